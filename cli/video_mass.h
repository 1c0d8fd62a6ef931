// SPDX-License-Identifier: Apache-2.0
// tilesieve mass for captured calls of a video model: a row for each call.
#pragma once

#include "video_study.h"

namespace tilesieve::cli {

struct VideoMassCommand {
  std::string file;
  CaptureOptions captures;
  StudyOptions study;
  ExecutionOptions execution;
  bool per_head = false, json = false;
};

void run_video_mass(const VideoMassCommand& command);

}  // namespace tilesieve::cli
