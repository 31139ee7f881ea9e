// Copies between tensors with their width innermost and buffers with their tokens innermost.
#pragma once

#include "vectors.h"

namespace {

inline void copy_square(const float* from, int64_t from_column, float* to, int64_t to_row,
                        float scale, bool adds) {
  Vector x[kLanes];
#pragma GCC unroll 16
  for (int column = 0; column < kLanes; ++column) x[column] = load(from + column * from_column);
  transpose(x);
#pragma GCC unroll 16
  for (int row = 0; row < kLanes; ++row) {
    float* const at = to + row * to_row;
    store(at, adds ? load(at) + x[row] * scale : x[row] * scale);
  }
}

// At most kLanes rows of to (rows, columns) = scale · the transpose of from (columns, rows), or of to
// += that. Columns of `from` and rows of `to` lie so many numbers apart.
void transpose_rows(const float* from, int64_t from_column, float* to, int64_t to_row, int64_t rows,
                    int64_t columns, float scale, bool adds) {
  for (int64_t column = 0; column < columns; column += kLanes) {
    if (rows >= kLanes && column + kLanes <= columns) {
      copy_square(from, from_column, to, to_row, scale, adds);
    } else {
      for (int64_t r = 0; r < std::min<int64_t>(kLanes, rows); ++r) {
        for (int64_t c = 0; c < std::min<int64_t>(kLanes, columns - column); ++c) {
          float& entry = to[r * to_row + c];
          entry = scale * from[c * from_column + r] + (adds ? entry : 0.0f);
        }
      }
    }
    from += kLanes * from_column;
    to += kLanes;
  }
}

// to (width, padded) = scale · the transpose of from (tokens, width), with zeros for absent tokens.
void load_transposed(const float* from, int64_t token, int width, int tokens, float scale, float* to,
                     int padded) {
  for (int row = 0; row < width; row += kLanes) {
    transpose_rows(from + row, token, to + int64_t(row) * padded, padded, width - row, tokens, scale,
                   false);
  }
  for (int n = 0; tokens < padded && n < width; ++n) {
    std::fill(to + int64_t(n) * padded + tokens, to + int64_t(n + 1) * padded, 0.0f);
  }
}

// to (tokens, width) = scale · from (width, padded).
void store_transposed(const float* from, int padded, int width, int tokens, float scale, float* to,
                      int64_t token) {
  for (int t = 0; t < tokens; t += kLanes) {
    transpose_rows(from + t, padded, to + t * token, token, tokens - t, width, scale, false);
  }
}

}  // namespace

extern "C" {

// to = scale · from, or to += scale · from. Both have the same five sizes, and strides in numbers:
// the fourth is 1 in `from`, the fifth in `to`.
void copy_transposed(const float* from, float* to, const int64_t* sizes,
                     const int64_t* from_strides, const int64_t* to_strides, float scale, int adds,
                     int threads) {
  const int64_t rows = sizes[3], columns = sizes[4];
  const int64_t from_column = from_strides[4], to_row = to_strides[3];
#pragma omp parallel for collapse(4) num_threads(threads)
  for (int64_t i = 0; i < sizes[0]; ++i) {
    for (int64_t j = 0; j < sizes[1]; ++j) {
      for (int64_t k = 0; k < sizes[2]; ++k) {
        for (int64_t row = 0; row < rows; row += kLanes) {
          const float* source = from + i * from_strides[0] + j * from_strides[1] +
                                k * from_strides[2] + row;
          float* target = to + i * to_strides[0] + j * to_strides[1] + k * to_strides[2] +
                          row * to_row;
          transpose_rows(source, from_column, target, to_row, rows - row, columns, scale, adds);
        }
      }
    }
  }
}

}  // extern "C"
