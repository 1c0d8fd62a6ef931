// SPDX-License-Identifier: Apache-2.0
// What DLPack 1.x lays down in memory (https://dmlc.github.io/dlpack): a tensor, the two kinds of capsule that
// __dlpack__ returns, and the table of functions that a type may offer as __dlpack_c_exchange_api__.
#pragma once

#include <cstdint>

namespace tilesieve::dlpack {

enum DeviceType : int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };

enum TypeCode : uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBfloat = 4,
  kBool = 6,
  kFloat8E4m3fn = 10,
  kFloat8E4m3fnuz = 11,
  kFloat8E5m2 = 12,
  kFloat8E5m2fnuz = 13
};

struct Device {
  DeviceType type;
  int32_t id;
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t num_dims;
  DataType dtype;
  int64_t* sizes;
  int64_t* strides;  // elements; nullptr = row-major
  uint64_t byte_offset;
};

// In a capsule named "dltensor".
struct ManagedTensor {
  Tensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};

struct Version {
  uint32_t major, minor;
};

inline constexpr uint64_t kReadOnly = 1;

// In a capsule named "dltensor_versioned".
struct ManagedTensorVersioned {
  Version version;
  void* context;
  void (*deleter)(ManagedTensorVersioned*);
  uint64_t flags;
  Tensor tensor;
};

// In a capsule named "dlpack_exchange_api". The functions return 0, or set a Python exception. What is not called here
// is declared by its place alone.
struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  void (*allocate)();
  void (*managed_from_object)();
  void (*object_from_managed)();
  int (*tensor_from_object)(void* object, Tensor* out);  // borrowed, not ordered with any stream
  int (*current_work_stream)(DeviceType type, int32_t id, void** out);
};

}  // namespace tilesieve::dlpack
