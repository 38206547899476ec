/* The inner loops of the chunk codecs: each is also written with NumPy, in the module that calls it
   through kernels.py, and gives the same bytes there. No function allocates, keeps state or knows
   Python; all memory is the caller's, who has checked every length. Any number of threads may be
   in here at once. Elements are little-endian and may lie at any address. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* With GCC's function versions the processor at hand is used well by one file. (Clang gives such
   functions other names.) */
#if !defined(__x86_64__) || !defined(__GLIBC__) || defined(__clang__)
#define FAST
#elif __GNUC__ < 12
#define FAST __attribute__((target_clones("avx2", "default")))
#else
#define FAST __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#endif

/* What this was compiled from: kernels.py does not take it for another source. */
const uint32_t kernels_source = SOURCE;

enum { BLOCK = 2048, SAMPLE = 2048, NIBBLES = 2, CRUMBS = 4 };

/* Differences and planes ----------------------------------------------------------------------- */

typedef uint16_t __attribute__((aligned(1), may_alias)) near16;
typedef uint32_t __attribute__((aligned(1), may_alias)) near32;
typedef uint64_t __attribute__((aligned(1), may_alias)) near64;

/* Halves of half the width are what compilers turn into vectors best, in both directions. */
#define CUT(HALF, from, low, high)                                                                 \
  for (size_t i = 0; i < n; i++) {                                                                 \
    low[i] = (HALF)from[i];                                                                        \
    high[i] = (HALF)(from[i] >> 8 * sizeof(HALF));                                                 \
  }
#define PAIR(WHOLE, low, high, to)                                                                 \
  for (size_t i = 0; i < n; i++) to[i] = (WHOLE)(low[i] | (WHOLE)high[i] << 4 * sizeof(WHOLE));

#define INNER static inline __attribute__((always_inline)) void

INNER cut1(const uint8_t *from, size_t n, uint8_t *const *to) { memcpy(to[0], from, n); }

INNER cut2(const uint16_t *from, size_t n, uint8_t *const *to) {
  uint8_t *restrict low = to[0], *restrict high = to[1];
  CUT(uint8_t, from, low, high)
}

INNER cut4(const uint32_t *from, size_t n, uint8_t *const *to) {
  uint16_t low[BLOCK], high[BLOCK];
  CUT(uint16_t, from, low, high)
  cut2(low, n, to);
  cut2(high, n, to + 2);
}

INNER cut8(const uint64_t *from, size_t n, uint8_t *const *to) {
  uint32_t low[BLOCK], high[BLOCK];
  CUT(uint32_t, from, low, high)
  cut4(low, n, to);
  cut4(high, n, to + 4);
}

INNER pair1(const uint8_t *const *from, size_t n, uint8_t *to) { memcpy(to, from[0], n); }

INNER pair2(const uint8_t *const *from, size_t n, uint16_t *restrict to) {
  const uint8_t *low = from[0], *high = from[1];
  PAIR(uint16_t, low, high, to)
}

INNER pair4(const uint8_t *const *from, size_t n, uint32_t *restrict to) {
  uint16_t low[BLOCK], high[BLOCK];
  pair2(from, n, low);
  pair2(from + 2, n, high);
  PAIR(uint32_t, low, high, to)
}

INNER pair8(const uint8_t *const *from, size_t n, uint64_t *restrict to) {
  uint32_t low[BLOCK], high[BLOCK];
  pair4(from, n, low);
  pair4(from + 4, n, high);
  PAIR(uint64_t, low, high, to)
}

/* Cuts `values`, or their zig-zag coded differences to `base` if it is not null, into byte planes of
   `count` bytes each. */
#define SPLIT(WORD, SIGNED, NEAR, WIDTH)                                                           \
  FAST void split_##WIDTH(const NEAR *values, const NEAR *base, size_t count, uint8_t *planes) {   \
    WORD block[BLOCK];                                                                             \
    for (size_t at = 0; at < count; at += BLOCK) {                                                 \
      size_t n = count - at < BLOCK ? count - at : BLOCK;                                          \
      uint8_t *to[WIDTH];                                                                          \
      for (int k = 0; k < WIDTH; k++) to[k] = planes + k * count + at;                             \
      if (base) {                                                                                  \
        for (size_t i = 0; i < n; i++) {                                                           \
          WORD d = (WORD)(values[at + i] - base[at + i]);                                          \
          block[i] = (WORD)((WORD)(d << 1) ^ (WORD)((SIGNED)d >> (8 * WIDTH - 1)));                \
        }                                                                                          \
      } else {                                                                                     \
        memcpy(block, values + at, n * WIDTH);                                                     \
      }                                                                                            \
      cut##WIDTH(block, n, to);                                                                    \
    }                                                                                              \
  }

SPLIT(uint8_t, int8_t, uint8_t, 1)
SPLIT(uint16_t, int16_t, near16, 2)
SPLIT(uint32_t, int32_t, near32, 4)
SPLIT(uint64_t, int64_t, near64, 8)

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
FAST int symbols_suit(const uint8_t *stream, size_t size, uint8_t *listed) {
  uint32_t counts[256] = {0}; /* above the value's complement, so that the highest is the one */
  uint32_t total = 0, sum = 0, three = 0;
  for (size_t i = 0, step = size / SAMPLE | 1; i < size; i += step, total++) counts[stream[i]]++;
  for (uint32_t value = 0; value < 256; value++) counts[value] = counts[value] << 8 | (255 - value);
  for (int place = 0; place < 15; place++) {
    uint32_t best = 0;
    for (int value = 0; value < 256; value++) best = best > counts[value] ? best : counts[value];
    uint32_t count = best >> 8;
    if (!place && (count * 25 < total || count * 200 >= total * 199)) return 0;
    listed[place] = (uint8_t)(255 - best);
    counts[listed[place]] = 0;
    sum += count;
    if (place == 2) three = sum;
  }
  if (three * 50 >= total * 37) return CRUMBS;
  return sum * 4 >= total * 3 ? NIBBLES : 0;
}

/* Packs the places of all bytes in `listed`, the first in the low bits, the last byte filled up with
   zeros; bytes that are not listed get the highest code and go to `others`. Returns how many. */
FAST size_t symbols_pack(const uint8_t *stream, size_t size, int per_byte, const uint8_t *listed,
                        uint8_t *packed, uint8_t *others) {
  uint8_t codes[BLOCK], last = per_byte == CRUMBS ? 3 : 15;
  size_t count = 0;
  for (size_t at = 0; at < size; at += BLOCK) {
    size_t n = size - at < BLOCK ? size - at : BLOCK;
    const uint8_t *bytes = stream + at;
    if (n < BLOCK) memset(codes, 0, sizeof codes);
    if (per_byte == CRUMBS) {
      uint8_t zero = listed[0], one = listed[1], two = listed[2];
      for (size_t i = 0; i < n; i++)
        codes[i] = bytes[i] == zero ? 0 : bytes[i] == one ? 1 : bytes[i] == two ? 2 : 3;
    } else {
      for (size_t i = 0; i < n; i++) { /* at most one is equal; vectors have no table of 256 */
        uint8_t byte = bytes[i], code = 15;
        for (int k = 0; k < 15; k++) code ^= byte == listed[k] ? 15 ^ k : 0;
        codes[i] = code;
      }
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
INNER expand(const uint8_t *packed, size_t n, int per_byte, uint8_t *codes) {
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
FAST size_t symbols_others(const uint8_t *packed, size_t size, int per_byte) {
  uint8_t last = per_byte == CRUMBS ? 3 : 15, bits = 8 / per_byte;
  size_t whole = size / per_byte, count = 0;
  for (size_t at = 0; at < whole; at += BLOCK) {
    size_t n = whole - at < BLOCK ? whole - at : BLOCK;
    unsigned found = 0;
    if (per_byte == CRUMBS) {
      for (size_t i = 0; i < n; i++) { /* both bits of a code, of each of the four */
        uint8_t both = packed[at + i] & packed[at + i] >> 1;
        found += (both & 1) + (both >> 2 & 1) + (both >> 4 & 1) + (both >> 6 & 1);
      }
    } else {
      for (size_t i = 0; i < n; i++)
        found += ((packed[at + i] & 15) == 15) + (packed[at + i] >> 4 == 15);
    }
    count += found;
  }
  for (size_t i = 0; i < size % per_byte; i++) count += (packed[whole] >> bits * i & last) == last;
  return count;
}

/* Stored streams ------------------------------------------------------------------------------- */

/* A stream as it is stored, see streams.py: its bytes, or if `per_byte` is not 0 its packed codes and
   the others, as many as `symbols_others` says. Where there is no pointer one byte stands for all. */
struct stream {
  const uint8_t *bytes, *others;
  uint8_t byte, other, per_byte, listed[15], padding[6];
};

/* The values of `n` codes. `codes` and `out` have room for the next multiple of 16, as so many are
   looked up at once. */
INNER look_up(const uint8_t *values, const uint8_t *codes, size_t n, uint8_t *out) {
#if defined(__GNUC__) && !defined(__clang__)
  typedef uint8_t sixteen __attribute__((vector_size(16)));
  sixteen table, some;
  memcpy(&table, values, 16);
  for (size_t i = 0; i < n; i += 16) {
    memcpy(&some, codes + i, 16);
    some = __builtin_shuffle(table, some);
    memcpy(out + i, &some, 16);
  }
#else
  for (size_t i = 0; i < n; i++) out[i] = values[codes[i]];
#endif
}

/* The `n` values of a packed stream from `at` on; `next` of the others have been used before. */
INNER unpack(const struct stream *s, size_t at, size_t n, size_t *next, uint8_t *out) {
  uint8_t codes[BLOCK], same[BLOCK / 2], values[16], last = s->per_byte == CRUMBS ? 3 : 15;
  memcpy(values, s->listed, last);
  memset(values + last, 0, sizeof values - last);
  expand(s->bytes ? s->bytes + at / s->per_byte : memset(same, s->byte, sizeof same), n,
         s->per_byte, codes);
  if (n < BLOCK) memset(codes + n, 0, BLOCK - n);
  if (s->per_byte == CRUMBS) {
    for (size_t i = 0; i < n; i++)
      out[i] = codes[i] == 0 ? values[0] : codes[i] == 1 ? values[1] : values[2];
  } else {
    look_up(values, codes, n, out);
  }
  for (size_t from = 0; from < n; from += 64)
    for (uint64_t found = equals(codes + from, last); found; found &= found - 1)
      out[from + (size_t)__builtin_ctzll(found)] = s->others ? s->others[(*next)++] : s->other;
}

/* Undoes SPLIT: the streams are byte planes of `count` bytes. `base` may be null, and `values` may be
   the same memory as `base`. */
#define JOIN(WORD, NEAR, WIDTH)                                                                    \
  FAST void join_##WIDTH(const struct stream *streams, size_t count, const NEAR *base,             \
                        NEAR *values) {                                                            \
    WORD block[BLOCK];                                                                             \
    uint8_t bytes[WIDTH][BLOCK];                                                                   \
    const uint8_t *planes[WIDTH];                                                                  \
    size_t next[WIDTH] = {0};                                                                      \
    for (int k = 0; k < WIDTH; k++)                                                                \
      if (!streams[k].per_byte && !streams[k].bytes) memset(bytes[k], streams[k].byte, BLOCK);     \
    for (size_t at = 0; at < count; at += BLOCK) {                                                 \
      size_t n = count - at < BLOCK ? count - at : BLOCK;                                          \
      for (int k = 0; k < WIDTH; k++) {                                                            \
        const struct stream *s = streams + k;                                                      \
        planes[k] = s->per_byte || !s->bytes ? bytes[k] : s->bytes + at;                           \
        if (s->per_byte) unpack(s, at, n, next + k, bytes[k]);                                     \
      }                                                                                            \
      pair##WIDTH(planes, n, block);                                                               \
      if (base)                                                                                    \
        for (size_t i = 0; i < n; i++)                                                             \
          block[i] = (WORD)(base[at + i] + ((block[i] >> 1) ^ (WORD)(0 - (block[i] & 1))));        \
      memcpy(values + at, block, n * WIDTH);                                                       \
    }                                                                                              \
  }

JOIN(uint8_t, uint8_t, 1)
JOIN(uint16_t, near16, 2)
JOIN(uint32_t, near32, 4)
JOIN(uint64_t, near64, 8)

/* Classes -------------------------------------------------------------------------------------- */

/* See by_exponent.py: the class of an element is class_of[key], its key are 8 bits of its reference
   from bit `at` on. `counts` has 256; `next` is where each class goes on in `sorted`, which holds the
   zig-zag coded differences. (A reference that somebody writes to meanwhile leads nowhere else.) */
#define CLASSES(WORD, SIGNED, NEAR, WIDTH)                                                         \
  void key_counts_##WIDTH(const NEAR *base, size_t count, int at, uint32_t *counts) {              \
    uint32_t some[4][256] = {{0}}; /* equal keys in a row do not wait for each other */            \
    for (size_t i = 0; i < count; i++) some[i & 3][(uint8_t)(base[i] >> at)]++;                    \
    for (int key = 0; key < 256; key++)                                                            \
      counts[key] = some[0][key] + some[1][key] + some[2][key] + some[3][key];                     \
  }                                                                                                \
  void sort_##WIDTH(const NEAR *values, const NEAR *base, size_t count, int at,                    \
                    const uint8_t *class_of, uint32_t *next, NEAR *sorted) {                       \
    for (size_t i = 0; i < count; i++) {                                                           \
      WORD d = (WORD)(values[i] - base[i]);                                                        \
      uint32_t place = next[class_of[(uint8_t)(base[i] >> at)]]++;                                 \
      sorted[place < count ? place : 0] =                                                          \
          (WORD)((WORD)(d << 1) ^ (WORD)((SIGNED)d >> (8 * WIDTH - 1)));                           \
    }                                                                                              \
  }                                                                                                \
  void unsort_##WIDTH(const NEAR *sorted, const NEAR *base, size_t count, int at,                  \
                      const uint8_t *class_of, uint32_t *next, NEAR *values) {                     \
    for (size_t i = 0; i < count; i++) {                                                           \
      uint32_t place = next[class_of[(uint8_t)(base[i] >> at)]]++;                                 \
      WORD z = sorted[place < count ? place : 0];                                                  \
      values[i] = (WORD)(base[i] + ((z >> 1) ^ (WORD)(0 - (z & 1))));                              \
    }                                                                                              \
  }

CLASSES(uint16_t, int16_t, near16, 2)
CLASSES(uint32_t, int32_t, near32, 4)
CLASSES(uint64_t, int64_t, near64, 8)

/* Floats --------------------------------------------------------------------------------------- */

/* float32 to bfloat16, to the nearest, ties to even. Returns whether a NaN was among them, which
   are the caller's to settle. */
FAST int round_bfloat16(const void *floats, size_t count, void *halves) {
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
FAST void adam_step(const float *numbers, const float *before, const float *after, float *second,
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
