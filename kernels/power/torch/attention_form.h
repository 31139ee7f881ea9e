// The attention form at degrees 1 and 2 in one pass over tensors as they are, (B, T, heads, width).
//
// A thread copies keys and values of a head, transposed, into memory of its own, and goes through
// the queries that meet them. Up to some thousand tokens its second-level cache holds them. Widths
// are innermost; strides are in numbers.
#pragma once

#include <cmath>

#include "attention.h"
#include "copies.h"

namespace {

// A tensor (B, T, heads, width).
template <typename Number>
struct Tokens {
  Number* data;
  int64_t batch, token, head;

  Number* at(int b, int64_t t, int h) const { return data + b * batch + t * token + h * head; }
};

// Sizes of a call. T tokens are `blocks` blocks of C, the last of which may lack some. Each of the G
// key heads serves R query heads.
struct Sizes {
  int B, T, G, R, K, V, C, blocks;
  int S;  // gated sums of gated_sums.h
  int normalize, degree;
  float scale;  // of queries
  float floor;  // the least magnitude of a denominator, which at degree 1 may be negative

  int present(int block) const { return std::min(C, T - block * C); }
};

// Calls body(h, block, first, t, count) for each span of the queries that meet key head g: its head,
// its block, its place there, its first token and the number of its tokens.
template <typename Body>
void for_each_span(const Sizes& n, int g, Body body) {
  for (int h = g * n.R; h < (g + 1) * n.R; ++h) {
    for (int block = 0; block < n.blocks; ++block) {
      for (int first = 0; first < n.present(block); first += kSpan) {
        body(h, block, first, int64_t(block) * n.C + first,
             std::min(kSpan, n.present(block) - first));
      }
    }
  }
}

// Calls body(block, t, count) for each block of keys.
template <typename Body>
void for_each_block(const Sizes& n, Body body) {
  for (int block = 0; block < n.blocks; ++block) {
    body(block, int64_t(block) * n.C, n.present(block));
  }
}

// Keys, and values with a row of ones, of one head, and with them its row.
class Head {
 public:
  static size_t size(const Sizes& n) { return size_t(n.blocks) * n.C * (n.K + n.V + 1); }

  Head(Scratch& scratch, const Sizes& n)
      : n_(n), k_(scratch.take(size(n))), v_(k_ + size_t(n.blocks) * n.C * n.K) {}

  Row load(const Tokens<const float>& k, const Tokens<const float>& v, const double* log_decay,
           int b, int g) const {
    const int K = n_.K, V = n_.V, C = n_.C;
    const int64_t k_size = int64_t(K) * C, v_size = int64_t(V + 1) * C;
    for_each_block(n_, [&](int block, int64_t t, int count) {
      load_transposed(k.at(b, t, g), k.token, K, count, 1.0f, k_ + block * k_size, C);
      load_transposed(v.at(b, t, g), v.token, V, count, 1.0f, v_ + block * v_size, C);
      std::fill_n(v_ + block * v_size + int64_t(V) * C, C, 1.0f);
    });
    if (log_decay != nullptr) log_decay += (int64_t(b) * n_.G + g) * n_.blocks * C;
    return {k_, v_, log_decay, k_size, v_size, C, V + 1, K, C};
  }

 private:
  const Sizes& n_;
  float* const k_;
  float* const v_;
};

}  // namespace

extern "C" {

// Writes out (B, T, H, V) and, where rows are normalised, inverse denominators and whether they were
// above their floor, (B, T, H). log_decay (B, G, blocks · C), or null without gates.
void attention_form(const Tokens<const float>* q, const Tokens<const float>* k,
                    const Tokens<const float>* v, const double* log_decay,
                    const Tokens<float>* out, const Tokens<float>* inverse,
                    const Tokens<bool>* is_live, const Sizes* sizes, int threads) {
  const Sizes& n = *sizes;
  const int V = n.V, K = n.K;
  const int heads = n.B * n.G;
  // With fewer heads than threads, several share the queries of each, and copy its keys.
  const int spans = n.R * n.blocks * ((n.C + kSpan - 1) / kSpan);
  const int parts = std::min(spans, (threads + heads - 1) / heads);
#pragma omp parallel num_threads(std::min(threads, heads * parts))
  {
    const FlushDenormals flushing;
    Scratch scratch(Head::size(n) + size_t(K + V + 1) * kSpan + Weights::size(V + 1, K, n.C));
    float* const query = scratch.take(size_t(K) * kSpan);
    float* const sum = scratch.take(size_t(V + 1) * kSpan);
    float* const denominator = sum + V * kSpan;
    const Weights own(scratch, V + 1, K, n.C);
    const Head head(scratch, n);
#pragma omp for collapse(3) schedule(dynamic)
    for (int b = 0; b < n.B; ++b) {
      for (int g = 0; g < n.G; ++g) {
        for (int part = 0; part < parts; ++part) {
          const Row row = head.load(*k, *v, log_decay, b, g);
          int turn = 0;
          for_each_span(n, g, [&](int h, int block, int first, int64_t t, int count) {
            if (turn++ % parts != part) return;
            load_transposed(q->at(b, t, h), q->token, K, count, n.scale, query, kSpan);
            for_degree(n.degree, [&](auto p) {
              attend_span<p>(row, 0, block, first, query, own, sum);
            });
            for (int i = 0; n.normalize && i < kSpan; ++i) {
              const bool is_above = std::abs(denominator[i]) >= n.floor;
              denominator[i] = is_above ? denominator[i] : n.floor;
              if (i >= count) continue;
              *inverse->at(b, t + i, h) = 1.0f / denominator[i];
              *is_live->at(b, t + i, h) = is_above;
            }
            for (int at = 0; n.normalize && at < V * kSpan; at += kLanes) {
              // The inverse of a large denominator would be denormal, and flushed.
              store(sum + at, load(sum + at) / load(denominator + at % kSpan));
            }
            store_transposed(sum, kSpan, V, count, 1.0f, out->at(b, t, h), out->token);
          });
        }
      }
    }
  }
}

// From dout the gradients dq, dk and dv, and, for the gradient of the gates, what eq. (15) sums:
// row_sums (B, T, H) and k_dk (B, T, G).
void attention_form_backward(const Tokens<const float>* q, const Tokens<const float>* k,
                             const Tokens<const float>* v, const double* log_decay,
                             const Tokens<const float>* out, const Tokens<const float>* dout,
                             const Tokens<const float>* inverse,
                             const Tokens<const bool>* is_live, const Tokens<float>* dq,
                             const Tokens<float>* dk, const Tokens<float>* dv,
                             const Tokens<float>* row_sums, const Tokens<float>* k_dk,
                             const Sizes* sizes, int threads) {
  const Sizes& n = *sizes;
  const int V = n.V, K = n.K, C = n.C;
#pragma omp parallel num_threads(std::min(threads, n.B * n.G))
  {
    const FlushDenormals flushing;
    Scratch scratch(2 * Head::size(n) + size_t(2 * K + 2 * V + 2) * kSpan +
                    Weights::size(V + 1, K, C));
    float* const query = scratch.take(size_t(K) * kSpan);
    float* const dquery = scratch.take(size_t(K) * kSpan);
    float* const dsum = scratch.take(size_t(V + 1) * kSpan);
    float* const ddenominator = dsum + V * kSpan;
    float* const output = scratch.take(size_t(V) * kSpan);
    float* const delta = scratch.take(kSpan);
    const Weights own(scratch, V + 1, K, C);
    const Head head(scratch, n);
    float* const dkeys = scratch.take(Head::size(n));
    float* const dvalues = dkeys + size_t(n.blocks) * C * K;
#pragma omp for collapse(2) schedule(dynamic)
    for (int b = 0; b < n.B; ++b) {
      for (int g = 0; g < n.G; ++g) {
        const Row row = head.load(*k, *v, log_decay, b, g);
        std::fill_n(dkeys, n.blocks * row.k_stride, 0.0f);
        std::fill_n(dvalues, n.blocks * row.values_stride, 0.0f);
        for_each_span(n, g, [&](int h, int block, int first, int64_t t, int count) {
          load_transposed(q->at(b, t, h), q->token, K, count, n.scale, query, kSpan);
          load_transposed(dout->at(b, t, h), dout->token, V, count, 1.0f, dsum, kSpan);
          load_transposed(out->at(b, t, h), out->token, V, count, 1.0f, output, kSpan);
          // delta = dout·out, from which the gradient of the denominator follows, eq. (11).
          std::fill_n(delta, kSpan, 0.0f);
          for (int at = 0; at < V * kSpan; at += kLanes) {
            float* const to = delta + at % kSpan;
            store(to, load(to) + load(dsum + at) * load(output + at));
          }
          for (int i = 0; i < count; ++i) {
            const bool divides = n.normalize && *is_live->at(b, t + i, h);
            *row_sums->at(b, t + i, h) = divides ? 0.0f : delta[i];
            if (!divides) delta[i] = 0.0f;
          }
          alignas(64) float factor[kSpan];
          for (int i = 0; i < kSpan; ++i) {
            factor[i] = n.normalize && i < count ? *inverse->at(b, t + i, h) : 1.0f;
            ddenominator[i] = -delta[i] * factor[i];
          }
          for (int at = 0; n.normalize && at < V * kSpan; at += kLanes) {
            store(dsum + at, load(dsum + at) * load(factor + at % kSpan));
          }
          for_degree(n.degree, [&](auto p) {
            attend_span_backward<p>(row, 0, block, first, query, dsum, own, dquery, dkeys,
                                    dvalues);
          });
          store_transposed(dquery, kSpan, K, count, n.scale, dq->at(b, t, h), dq->token);
        });
        for_each_block(n, [&](int block, int64_t t, int count) {
          const float* const keys = row.k + block * row.k_stride;
          float* const dkey = dkeys + block * row.k_stride;
          store_transposed(dkey, C, K, count, 1.0f, dk->at(b, t, g), dk->token);
          store_transposed(dvalues + block * row.values_stride, C, V, count, 1.0f,
                           dv->at(b, t, g), dv->token);
          for (int i = 0; i < count; ++i) {
            float total = 0.0f;
            for (int at = i; at < K * C; at += C) total += keys[at] * dkey[at];
            *k_dk->at(b, t + i, g) = total;
          }
        });
      }
    }
  }
}

}  // extern "C"
