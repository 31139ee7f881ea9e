// The rotation of pairs and its gradients, in one pass each.
//
// Rows have sizes (B, T, H) and 2 J entries; phases J entries for rows that may share them, which
// then have a stride of 0. Strides are in numbers.

#include <cstdint>

namespace {

constexpr int64_t kFew = 1 << 14;  // pairs, below which waking threads takes longer

struct Rows {
  const int64_t* strides;
  int64_t at(int64_t b, int64_t t, int64_t h) const {
    return b * strides[0] + t * strides[1] + h * strides[2];
  }
};

inline void rotate_row(const float* __restrict x, const float* __restrict cosine,
                       const float* __restrict sine, float* __restrict y, int64_t J, float sign) {
  for (int64_t j = 0; j < J; ++j) {
    y[j] = x[j] * cosine[j] - sign * sine[j] * x[J + j];
    y[J + j] = sign * sine[j] * x[j] + x[J + j] * cosine[j];
  }
}

}  // namespace

extern "C" {

// y (contiguous) = x turned by its phases.
void rotate(const float* x, const int64_t* x_strides, const float* cosine, const float* sine,
            const int64_t* phase_strides, float* y, const int64_t* sizes, int threads) {
  const int64_t B = sizes[0], T = sizes[1], H = sizes[2], J = sizes[3];
  const Rows rows{x_strides}, phases{phase_strides};
#pragma omp parallel for collapse(2) num_threads(threads) if (B * T * H * J > kFew)
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t h = 0; h < H; ++h) {
        const int64_t phase = phases.at(b, t, h);
        rotate_row(x + rows.at(b, t, h), cosine + phase, sine + phase,
                   y + ((b * T + t) * H + h) * 2 * J, J, 1.0f);
      }
    }
  }
}

// From dy the gradients dx (contiguous), and dcosine and dsine (B, T, H, J), or (B, T, J) if the
// heads of a token share phases.
void rotate_backward(const float* dy, const int64_t* dy_strides, const float* x,
                     const int64_t* x_strides, const float* cosine, const float* sine,
                     const int64_t* phase_strides, float* dx, float* dcosine, float* dsine,
                     const int64_t* sizes, int threads) {
  const int64_t B = sizes[0], T = sizes[1], H = sizes[2], J = sizes[3];
  const Rows rows{x_strides}, drows{dy_strides}, phases{phase_strides};
  const bool is_shared = phase_strides[2] == 0;
#pragma omp parallel for collapse(2) num_threads(threads) if (B * T * H * J > kFew)
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t h = 0; h < H; ++h) {
        const int64_t phase = phases.at(b, t, h), token = b * T + t;
        const float* __restrict const one = dy + drows.at(b, t, h);
        const float* __restrict const first = x + rows.at(b, t, h);
        const int64_t to = is_shared ? token * J : (token * H + h) * J;
        float* __restrict const dcos = dcosine + to;
        float* __restrict const dsin = dsine + to;
        const bool adds = is_shared && h > 0;
        rotate_row(one, cosine + phase, sine + phase, dx + (token * H + h) * 2 * J, J, -1.0f);
        for (int64_t j = 0; j < J; ++j) {
          const float cos_part = one[j] * first[j] + one[J + j] * first[J + j];
          const float sin_part = one[J + j] * first[j] - one[j] * first[J + j];
          dcos[j] = adds ? dcos[j] + cos_part : cos_part;
          dsin[j] = adds ? dsin[j] + sin_part : sin_part;
        }
      }
    }
  }
}

}  // extern "C"
