# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M in NumPy: weights and tokeniser out of a GGUF file, and a float32 forward pass over one long text.

Written to be read and to be checked, not to be fast: it exists so that the attention inputs of a real model can be
looked at without a deep-learning framework. Shapes use T for tokens, D for the model's width, H for query heads,
G for key/value heads and d for the width of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import gguf.quants
import numpy as np
import numpy.typing as npt
import regex

Float32 = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.int64]

# Rows of queries that attention takes at once, and rows of logits: both bound memory, neither changes the result.
ATTENTION_ROWS = 128
LOGIT_ROWS = 512

# Called after each layer's attention with (layer, q [T, H, d], k [T, G, d], v [T, G, d], output [T, H, d]).
AttentionHook = Callable[[int, Float32, Float32, Float32, Float32], None]

# Computes a layer's attention: (layer, q [T, H, d], k [T, G, d], v [T, G, d], softmax scale) -> [T, H, d].
Attention = Callable[[int, Float32, Float32, Float32, float], Float32]


class ModelError(Exception):
    """The GGUF file is not the model that this code was written for."""


@dataclass(frozen=True)
class Config:
    """The sizes that the forward pass needs, as the GGUF file states them."""

    layers: int
    width: int
    query_heads: int
    kv_heads: int
    head_dim: int
    context: int
    rope_theta: float
    norm_epsilon: float

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.query_heads // self.kv_heads

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5


@dataclass(frozen=True)
class Layer:
    """One layer's float32 weights; matrices are [out, in] as in the file."""

    attention_norm: Float32
    query: Float32
    key: Float32
    value: Float32
    attention_output: Float32
    mlp_norm: Float32
    gate: Float32
    up: Float32
    down: Float32


def unpermute_rope_rows(weight: Float32, heads: int) -> Float32:
    """Put a query or key matrix [heads * d, D] back into the model's own row order.

    The model rotates channel i of a head together with channel i + d/2. Llama files in GGUF interleave the rows of
    each head, so that such a pair lies side by side at 2i and 2i + 1 and a pair-wise RoPE can be used. Either order
    gives the same attention scores, because q and k are permuted alike. The original order is restored here so that
    the captured channels are those of the published model, and because two contiguous halves are quick in NumPy.
    """
    rows, columns = weight.shape
    half = rows // heads // 2
    return np.ascontiguousarray(weight.reshape(heads, half, 2, columns).swapaxes(1, 2).reshape(rows, columns))


class Weights:
    """The GGUF file's tensors, dequantised to float32 when they are asked for.

    One layer is 14 MB in float32, so taking them one at a time keeps memory small, and the file stays mapped.
    """

    def __init__(self, path: Path) -> None:
        self._reader = gguf.GGUFReader(str(path))
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.config = self._read_config()

    def field(self, key: str) -> Any:
        """One metadata value of the file: a number, a string or a list of them."""
        field = self._reader.get_field(key)
        if field is None:
            raise ModelError(f"the GGUF file has no field {key!r}")
        return field.contents()

    def _read_config(self) -> Config:
        if self.field("general.architecture") != "llama":
            raise ModelError(f"expected a 'llama' model, found {self.field('general.architecture')!r}")
        width, heads = self.field("llama.embedding_length"), self.field("llama.attention.head_count")
        head_dim = self.field("llama.rope.dimension_count")
        if head_dim * heads != width:
            raise ModelError("RoPE over a part of the head is not supported")
        return Config(
            layers=self.field("llama.block_count"),
            width=width,
            query_heads=heads,
            kv_heads=self.field("llama.attention.head_count_kv"),
            head_dim=head_dim,
            context=self.field("llama.context_length"),
            rope_theta=self.field("llama.rope.freq_base"),
            norm_epsilon=self.field("llama.attention.layer_norm_rms_epsilon"),
        )

    def tensor(self, name: str) -> Float32:
        """A tensor as float32: [out, in] for matrices (GGUF states shapes the other way round)."""
        if name not in self._tensors:
            raise ModelError(f"the GGUF file has no tensor {name!r}")
        tensor = self._tensors[name]
        return np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)

    def embedding(self) -> Float32:
        """[vocabulary, D]; also the output matrix, because the model ties the two."""
        return self.tensor("token_embd.weight")

    def layer(self, index: int) -> Layer:
        def part(name: str) -> Float32:
            return self.tensor(f"blk.{index}.{name}.weight")

        return Layer(
            attention_norm=part("attn_norm"),
            query=unpermute_rope_rows(part("attn_q"), self.config.query_heads),
            key=unpermute_rope_rows(part("attn_k"), self.config.kv_heads),
            value=part("attn_v"),
            attention_output=part("attn_output"),
            mlp_norm=part("ffn_norm"),
            gate=part("ffn_gate"),
            up=part("ffn_up"),
            down=part("ffn_down"),
        )


def byte_symbols() -> list[str]:
    """The printable character that byte-level BPE vocabularies write for each of the 256 bytes.

    Printable Latin-1 bytes stand for themselves; the others are numbered upwards from U+0100 in byte order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols, spare = [], 0x100
    for byte in range(256):
        symbols.append(chr(byte if byte in printable else spare))
        spare += byte not in printable
    return symbols


class Tokenizer:
    """Byte-level BPE with the vocabulary and merges that the GGUF file carries."""

    # The 'smollm' rule is two splits in a row: every numeral alone, then GPT-2's pattern within what lies between.
    # The second must not look across the first's cuts, so they cannot be joined into one pattern.
    _NUMERAL = regex.compile(r"\p{N}|\P{N}+")
    _WORD = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

    def __init__(self, weights: Weights) -> None:
        kind = (weights.field("tokenizer.ggml.model"), weights.field("tokenizer.ggml.pre"))
        if kind != ("gpt2", "smollm"):
            raise ModelError(f"expected a gpt2/smollm tokeniser, found {'/'.join(kind)}")
        self.tokens: list[str] = weights.field("tokenizer.ggml.tokens")
        self._ids = {token: index for index, token in enumerate(self.tokens)}
        self._unknown: int = weights.field("tokenizer.ggml.unknown_token_id")
        merges: list[str] = weights.field("tokenizer.ggml.merges")
        self._ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self._symbols = byte_symbols()
        self._bytes = {symbol: byte for byte, symbol in enumerate(self._symbols)}
        self._words: dict[str, list[int]] = {}

    def encode(self, text: str) -> TokenIds:
        """Token ids [T] of plain text; names of special tokens in it are treated as the text that they are."""
        ids = [token for word in self._split(text) for token in self._encode_word(word)]
        return np.array(ids, dtype=np.int64)

    def decode(self, ids: TokenIds) -> str:
        """The text of token ids [T]; special tokens show by name."""
        raw = bytearray()
        for index in ids:
            raw.extend(self._bytes[symbol] for symbol in self.tokens[index] if symbol in self._bytes)
        return raw.decode("utf-8", errors="replace")

    def _split(self, text: str) -> Iterator[str]:
        for piece in self._NUMERAL.findall(text):
            yield from self._WORD.findall(piece)

    def _encode_word(self, word: str) -> list[int]:
        if word not in self._words:
            parts = self._merge([self._symbols[byte] for byte in word.encode("utf-8")])
            # The vocabulary lacks 21 of the 256 bytes (mostly those that UTF-8 never uses).
            self._words[word] = [self._ids.get(part, self._unknown) for part in parts]
        return self._words[word]

    def _merge(self, parts: list[str]) -> list[str]:
        """Join neighbours by the earliest-learnt merge until none applies."""
        never = len(self._ranks)
        while len(parts) > 1:
            ranks = [self._ranks.get(pair, never) for pair in pairwise(parts)]
            best = min(ranks)
            if best == never:
                break
            at = ranks.index(best)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return parts


def rms_norm(x: Float32, weight: Float32, epsilon: float) -> Float32:
    """Scale each row of x [T, D] to unit root mean square, then by weight [D]."""
    mean_square = np.einsum("td,td->t", x, x) / np.float32(x.shape[1])
    return x * (1.0 / np.sqrt(mean_square + np.float32(epsilon)))[:, None] * weight


def rope_tables(tokens: int, head_dim: int, theta: float) -> tuple[Float32, Float32]:
    """Cosines and sines [T, 1, d/2]; angles in float64, as float32 loses digits at late positions."""
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    angles = np.arange(tokens, dtype=np.float64)[:, None, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def apply_rope(x: Float32, cosines: Float32, sines: Float32) -> Float32:
    """Rotate channels i and i + d/2 of x [T, heads, d] by their position's angle."""
    half = x.shape[2] // 2
    first, second = x[..., :half], x[..., half:]
    return np.concatenate((first * cosines - second * sines, second * cosines + first * sines), axis=2)


def causal_attention(q: Float32, k: Float32, v: Float32, scale: float) -> Float32:
    """Exact causal attention, a block of rows at a time: q [T, H, d], k and v [T, G, d] -> [T, H, d]."""
    tokens, heads, dim = q.shape
    share = heads // k.shape[1]
    output = np.empty_like(q)
    above = np.triu(np.full((ATTENTION_ROWS, ATTENTION_ROWS), -np.inf, dtype=np.float32), 1)
    # One buffer for all blocks: fresh pages for every block of scores would cost more than the exponentials.
    scratch = np.empty(share * ATTENTION_ROWS * tokens, dtype=np.float32)
    for group in range(k.shape[1]):
        mine = slice(group * share, (group + 1) * share)
        keys, values = np.ascontiguousarray(k[:, group].T), np.ascontiguousarray(v[:, group])
        for start in range(0, tokens, ATTENTION_ROWS):
            stop = min(start + ATTENTION_ROWS, tokens)
            rows = stop - start
            # The group's query heads meet the same keys, so they go through one matrix product.
            queries = (q[start:stop, mine] * np.float32(scale)).swapaxes(0, 1).reshape(share * rows, dim)
            scores = scratch[: share * rows * stop].reshape(share * rows, stop)
            np.matmul(queries, keys[:, :stop], out=scores)
            scores.reshape(share, rows, stop)[:, :, start:] += above[:rows, :rows]
            scores -= scores.max(axis=1, keepdims=True)
            np.exp(scores, out=scores)
            mixed = scores @ values[:stop]
            mixed /= scores.sum(axis=1, keepdims=True)
            output[start:stop, mine] = mixed.reshape(share, rows, dim).swapaxes(0, 1)
    return output


def exact_attention(layer: int, q: Float32, k: Float32, v: Float32, scale: float) -> Float32:
    """The model's own attention, the same in every layer."""
    del layer
    return causal_attention(q, k, v, scale)


def mlp(x: Float32, layer: Layer) -> Float32:
    """The gated MLP: down(silu(gate(x)) * up(x)); [T, D] -> [T, D]."""
    hidden: Float32 = x @ layer.gate.T
    with np.errstate(over="ignore"):  # exp may reach infinity for very negative inputs; the quotient is then -0
        hidden /= np.float32(1) + np.exp(-hidden)
    hidden *= x @ layer.up.T
    return hidden @ layer.down.T


def forward(
    weights: Weights,
    token_ids: TokenIds,
    hook: AttentionHook | None = None,
    track: Callable[[range], Iterable[int]] = lambda layers: layers,
    attention: Attention = exact_attention,
) -> Float32:
    """Run token_ids [T] through all layers and the last norm; returns [T, D].

    `hook` sees every layer's attention (q and k after RoPE); `track` wraps the loop over layers, for a progress bar;
    `attention` computes it in the model's stead.
    """
    config = weights.config
    tokens = len(token_ids)
    cosines, sines = rope_tables(tokens, config.head_dim, config.rope_theta)
    x = weights.embedding()[token_ids]
    for index in track(range(config.layers)):
        layer = weights.layer(index)
        normed = rms_norm(x, layer.attention_norm, config.norm_epsilon)
        q = (normed @ layer.query.T).reshape(tokens, config.query_heads, config.head_dim)
        k = (normed @ layer.key.T).reshape(tokens, config.kv_heads, config.head_dim)
        v = (normed @ layer.value.T).reshape(tokens, config.kv_heads, config.head_dim)
        q, k = apply_rope(q, cosines, sines), apply_rope(k, cosines, sines)
        mixed = attention(index, q, k, v, config.softmax_scale)
        if hook is not None:
            hook(index, q, k, v, mixed)
        x += mixed.reshape(tokens, config.width) @ layer.attention_output.T
        x += mlp(rms_norm(x, layer.mlp_norm, config.norm_epsilon), layer)
    return rms_norm(x, weights.tensor("output_norm.weight"), config.norm_epsilon)


def mean_negative_log_likelihood(weights: Weights, hidden: Float32, token_ids: TokenIds) -> float:
    """Mean over tokens 1..T-1 of -log p(token | the ones before), in nats; hidden [T, D], token_ids [T]."""
    output = weights.embedding().T
    targets = token_ids[1:]
    total = 0.0
    for start in range(0, len(targets), LOGIT_ROWS):
        wanted = targets[start : start + LOGIT_ROWS]
        logits = hidden[start : start + len(wanted)] @ output
        logits -= logits.max(axis=1, keepdims=True)
        chosen = logits[np.arange(len(wanted)), wanted].astype(np.float64)
        total += float((np.log(np.exp(logits, out=logits).sum(axis=1, dtype=np.float64)) - chosen).sum())
    return total / len(targets)
