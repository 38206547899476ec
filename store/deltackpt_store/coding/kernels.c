/* The inner loops of the chunk codecs: each is also written with NumPy, in the module that calls it
   through kernels.py, and gives the same bytes there. No function allocates, keeps state or knows
   Python; all memory is the caller's, who has checked every length. Any number of threads may be
   in here at once. Elements are little-endian and may lie at any address. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* With GCC's and Clang's function versions the processor at hand is used well by one file. */
#if defined(__x86_64__) && defined(__GLIBC__)
#define FAST __attribute__((target_clones("avx2", "default")))
#else
#define FAST
#endif
#define API __attribute__((visibility("default"))) FAST

/* What this was compiled from: kernels.py does not take it for another source. */
__attribute__((visibility("default"))) const uint32_t kernels_source = SOURCE;

enum { BLOCK = 2048, SAMPLE = 2048, NIBBLES = 2, CRUMBS = 4 };

/* Differences and planes ----------------------------------------------------------------------- */

/* Cuts `values`, or their zig-zag coded differences to `base` if it is not null, into byte planes of
   `count` bytes each. */
#define SPLIT(WORD, SIGNED, WIDTH)                                                                 \
  API void split_##WIDTH(const void *values, const void *base, size_t count, uint8_t *planes) {    \
    WORD block[BLOCK], other[BLOCK];                                                               \
    for (size_t at = 0; at < count; at += BLOCK) {                                                 \
      size_t n = count - at < BLOCK ? count - at : BLOCK;                                          \
      memcpy(block, (const char *)values + at * WIDTH, n * WIDTH);                                 \
      if (base) {                                                                                  \
        memcpy(other, (const char *)base + at * WIDTH, n * WIDTH);                                 \
        for (size_t i = 0; i < n; i++) {                                                           \
          WORD d = (WORD)(block[i] - other[i]);                                                    \
          block[i] = (WORD)((WORD)(d << 1) ^ (WORD)((SIGNED)d >> (8 * WIDTH - 1)));                \
        }                                                                                          \
      }                                                                                            \
      for (int k = 0; k < WIDTH; k++) {                                                            \
        uint8_t *plane = planes + k * count + at;                                                  \
        for (size_t i = 0; i < n; i++) plane[i] = (uint8_t)(block[i] >> (8 * k));                  \
      }                                                                                            \
    }                                                                                              \
  }

SPLIT(uint8_t, int8_t, 1)
SPLIT(uint16_t, int16_t, 2)
SPLIT(uint32_t, int32_t, 4)
SPLIT(uint64_t, int64_t, 8)

/* Undoes SPLIT. A plane of stride 0 is one byte that stands for all. `base` may be null, and
   `values` may be the same memory as `base`. */
#define JOIN(WORD, WIDTH)                                                                          \
  API void join_##WIDTH(const uint8_t *const *planes, const uint8_t *strides, size_t count,        \
                        const void *base, void *values) {                                          \
    WORD block[BLOCK], other[BLOCK], fixed = 0;                                                    \
    for (int k = 0; k < WIDTH; k++)                                                                \
      if (!strides[k]) fixed |= (WORD)((WORD)planes[k][0] << (8 * k));                             \
    for (size_t at = 0; at < count; at += BLOCK) {                                                 \
      size_t n = count - at < BLOCK ? count - at : BLOCK;                                          \
      for (size_t i = 0; i < n; i++) block[i] = fixed;                                             \
      for (int k = 0; k < WIDTH; k++) {                                                            \
        if (!strides[k]) continue;                                                                 \
        const uint8_t *plane = planes[k] + at;                                                     \
        for (size_t i = 0; i < n; i++) block[i] |= (WORD)((WORD)plane[i] << (8 * k));              \
      }                                                                                            \
      if (base) {                                                                                  \
        memcpy(other, (const char *)base + at * WIDTH, n * WIDTH);                                 \
        for (size_t i = 0; i < n; i++)                                                             \
          block[i] = (WORD)(other[i] + ((block[i] >> 1) ^ (WORD)(0 - (block[i] & 1))));            \
      }                                                                                            \
      memcpy((char *)values + at * WIDTH, block, n * WIDTH);                                       \
    }                                                                                              \
  }

JOIN(uint8_t, 1)
JOIN(uint16_t, 2)
JOIN(uint32_t, 4)
JOIN(uint64_t, 8)

/* Symbols -------------------------------------------------------------------------------------- */

/* Which of 64 codes are `code`, as bits. */
static inline __attribute__((always_inline)) uint64_t equals(const uint8_t *codes, uint8_t code) {
  uint8_t same[64];
  uint64_t words[8], mask = 0;
  for (int i = 0; i < 64; i++) same[i] = codes[i] == code;
  memcpy(words, same, sizeof words);
  for (int i = 0; i < 8; i++) mask |= (words[i] * 0x0102040810204080u >> 56) << 8 * i;
  return mask;
}

/* How a stream of `size` bytes is best packed, judged on a sample: symbols to a byte (0, 2 or 4), and
   the values to list (15, the most frequent first, of equals the lowest). */
API int symbols_suit(const uint8_t *stream, size_t size, uint8_t *listed) {
  int32_t counts[256] = {0};
  int32_t total = 0, sum = 0, three = 0;
  for (size_t i = 0, step = size / SAMPLE | 1; i < size; i += step, total++) counts[stream[i]]++;
  for (int place = 0; place < 15; place++) {
    int best = 0;
    for (int value = 1; value < 256; value++)
      if (counts[value] > counts[best]) best = value;
    if (!place && (counts[best] * 25 < total || counts[best] * 200 >= total * 199)) return 0;
    listed[place] = (uint8_t)best;
    sum += counts[best];
    counts[best] = -1;
    if (place == 2) three = sum;
  }
  if (three * 50 >= total * 37) return CRUMBS;
  return sum * 4 >= total * 3 ? NIBBLES : 0;
}

/* Packs the places of all bytes in `listed`, the first in the low bits, the last byte filled up with
   zeros; bytes that are not listed get the highest code and go to `others`. Returns how many. */
API size_t symbols_pack(const uint8_t *stream, size_t size, int per_byte, const uint8_t *listed,
                        uint8_t *packed, uint8_t *others) {
  uint8_t place[256], codes[BLOCK], last = per_byte == CRUMBS ? 3 : 15;
  size_t count = 0;
  memset(place, 15, sizeof place);
  for (int i = 0; i < 15 && per_byte == NIBBLES; i++) place[listed[i]] = (uint8_t)i;
  for (size_t at = 0; at < size; at += BLOCK) {
    size_t n = size - at < BLOCK ? size - at : BLOCK;
    const uint8_t *bytes = stream + at;
    if (n < BLOCK) memset(codes, 0, sizeof codes);
    if (per_byte == CRUMBS) {
      uint8_t zero = listed[0], one = listed[1], two = listed[2];
      for (size_t i = 0; i < n; i++)
        codes[i] = bytes[i] == zero ? 0 : bytes[i] == one ? 1 : bytes[i] == two ? 2 : 3;
    } else {
      for (size_t i = 0; i < n; i++) codes[i] = place[bytes[i]];
    }
    for (size_t from = 0; from < n; from += 64)
      for (uint64_t found = equals(codes + from, last); found; found &= found - 1)
        others[count++] = bytes[from + (size_t)__builtin_ctzll(found)];
    uint8_t *out = packed + at / per_byte;
    size_t bytes_out = (n + per_byte - 1) / per_byte;
    if (per_byte == CRUMBS) {
      uint32_t words[BLOCK / 4];
      memcpy(words, codes, sizeof words);
      for (size_t i = 0; i < bytes_out; i++)
        out[i] = (uint8_t)(words[i] | words[i] >> 6 | words[i] >> 12 | words[i] >> 18);
    } else {
      uint16_t words[BLOCK / 2];
      memcpy(words, codes, sizeof words);
      for (size_t i = 0; i < bytes_out; i++) out[i] = (uint8_t)(words[i] | words[i] >> 4);
    }
  }
  return count;
}

/* One block of codes, one to a byte. */
static inline __attribute__((always_inline)) void expand(const uint8_t *packed, size_t n,
                                                         int per_byte, uint8_t *codes) {
  if (per_byte == CRUMBS) {
    uint32_t words[BLOCK / 4];
    for (size_t i = 0; i < (n + 3) / 4; i++) {
      uint32_t byte = packed[i];
      words[i] = (byte | byte << 6 | byte << 12 | byte << 18) & 0x03030303;
    }
    memcpy(codes, words, n);
  } else {
    uint16_t words[BLOCK / 2];
    for (size_t i = 0; i < (n + 1) / 2; i++)
      words[i] = (uint16_t)((packed[i] | packed[i] << 4) & 0x0f0f);
    memcpy(codes, words, n);
  }
}

/* How many of the first `size` codes are the highest: as many others follow. */
API size_t symbols_others(const uint8_t *packed, size_t size, int per_byte) {
  uint8_t codes[BLOCK], last = per_byte == CRUMBS ? 3 : 15;
  size_t count = 0;
  for (size_t at = 0; at < size; at += BLOCK) {
    size_t n = size - at < BLOCK ? size - at : BLOCK;
    unsigned found = 0;
    expand(packed + at / per_byte, n, per_byte, codes);
    for (size_t i = 0; i < n; i++) found += codes[i] == last;
    count += found;
  }
  return count;
}

/* Undoes `symbols_pack`; `others` are as many as `symbols_others` says. */
API void symbols_unpack(const uint8_t *packed, size_t size, int per_byte, const uint8_t *listed,
                        const uint8_t *others, uint8_t *stream) {
  uint8_t codes[BLOCK], values[16], last = per_byte == CRUMBS ? 3 : 15;
  size_t next = 0;
  memcpy(values, listed, last);
  memset(values + last, 0, sizeof values - last);
  for (size_t at = 0; at < size; at += BLOCK) {
    size_t n = size - at < BLOCK ? size - at : BLOCK;
    uint8_t *out = stream + at;
    expand(packed + at / per_byte, n, per_byte, codes);
    if (per_byte == CRUMBS)
      for (size_t i = 0; i < n; i++)
        out[i] = codes[i] == 0 ? values[0] : codes[i] == 1 ? values[1] : values[2];
    else
      for (size_t i = 0; i < n; i++) out[i] = values[codes[i]];
    if (n < BLOCK) memset(codes + n, 0, BLOCK - n);
    for (size_t from = 0; from < n; from += 64)
      for (uint64_t found = equals(codes + from, last); found; found &= found - 1)
        out[from + (size_t)__builtin_ctzll(found)] = others[next++];
  }
}

/* Floats --------------------------------------------------------------------------------------- */

/* float32 to bfloat16, to the nearest, ties to even. Returns whether a NaN was among them, which
   are the caller's to settle. */
API int round_bfloat16(const void *floats, size_t count, void *halves) {
  uint32_t block[BLOCK];
  uint16_t rounded[BLOCK];
  uint32_t wrong = 0;
  for (size_t at = 0; at < count; at += BLOCK) {
    size_t n = count - at < BLOCK ? count - at : BLOCK;
    memcpy(block, (const char *)floats + at * 4, n * 4);
    for (size_t i = 0; i < n; i++) {
      uint32_t bits = block[i];
      rounded[i] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
      wrong |= (bits & 0x7fffffff) > 0x7f800000;
    }
    memcpy((char *)halves + at * 2, rounded, n * 2);
  }
  return (int)wrong;
}

static inline __attribute__((always_inline)) float settled(float value) {
  uint32_t bits = 0x7fc00000;
  float nan;
  memcpy(&nan, &bits, 4);
  return value == value ? value : nan;
}

/* One step of adam.advance, in place. `numbers`: 1 - beta1, beta2, 1 - beta2, eps, decay, minus the
   step size, root; `weight` and `largest` may be null. Compiled without fused multiply-add, or the
   bits would depend on the processor. */
API void adam_step(const float *numbers, const float *before, const float *after, float *second,
                   float *weight, float *largest, size_t count) {
  float rest1 = numbers[0], beta2 = numbers[1], rest2 = numbers[2], eps = numbers[3];
  float decay = numbers[4], size = numbers[5], root = numbers[6];
  float moment[BLOCK];
  for (size_t at = 0; at < count; at += BLOCK) {
    size_t n = count - at < BLOCK ? count - at : BLOCK;
    const float *m = before + at, *next = after + at;
    float *v = second + at;
    for (size_t i = 0; i < n; i++) {
      float g = m[i] + (next[i] - m[i]) / rest1;
      v[i] = moment[i] = settled(v[i] * beta2 + g * g * rest2);
    }
    if (largest) {
      float *x = largest + at;
      for (size_t i = 0; i < n; i++)
        x[i] = moment[i] = settled(x[i] >= moment[i] ? x[i] : moment[i]);
    }
    if (weight) {
      float *w = weight + at;
      for (size_t i = 0; i < n; i++)
        w[i] = settled(w[i] * decay + next[i] * size / (sqrtf(moment[i]) / root + eps));
    }
  }
}
