// Implements bf16_pairs.h. compiler.py compiles this file without fused multiply-adds (contraction), so that panels have the bits
// of unpacked weights.
#include "bf16_pairs.h"

#if defined(__AVX512F__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

// A library for any processor with AVX-512 has these functions; has_bf16_pairs() and has_amx() tell whether they can be called.
#define BF16_TARGET __attribute__((target("avx512bf16")))
#if defined(__linux__) && defined(SYS_arch_prctl) && (defined(__clang__) || __GNUC__ >= 11)
#define GRAPHCORE_AMX 1
#define AMX_TARGET __attribute__((target("amx-tile,amx-bf16")))
#endif

namespace graphcore {
namespace {

constexpr int PAIR_NBYTES = PANEL_GROUPS * VECTOR_NBYTES;  // of a panel, for each pair of columns

// Stores two columns' weights as the pairs of sixteen rows.
BF16_TARGET inline void store_pairs(f32x16 first, f32x16 second, uint8_t* to) {
    alignas(64) static constexpr uint16_t ORDER[32] = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i columns = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    store(to, (u8x64)_mm512_permutexvar_epi16(load<__m512i>(ORDER), columns));
}

// Unpacks blocks of a group. to: of the first block, in this group's half of the panel.
template <class F>
BF16_TARGET void fill_group(const uint8_t* group, int columns, Range blocks, float scale, uint8_t* to) {
    for (int block = blocks.begin; block < blocks.end; block++) {
        const Stretch<F> here(group, columns, block / CHUNK_BLOCKS);
        const int within = block % CHUNK_BLOCKS, part = here.part_of(within);
        const uint8_t *codes = here.codes_of(within), *meta = here.meta_of(within);
        for (int half = 0; half < 2; half++) {
            const int own = part + (F::HALVES ? half : 0);
            const FloatPart scales = F::ONE_SCALE ? splat(scale) : F::scale(meta, own, 0);
            const FloatPart shift = shift_of<F>(meta, own, 0);
            for (int j = half * QUADS / 2; j < (half + 1) * QUADS / 2; j++) {
                const IntPart quad = (IntPart)values_of<F>(codes, j);
                for (int pair = 0; pair < 2; pair++, to += PAIR_NBYTES)
                    store_pairs(weights_of<F>((quad >> 16 * pair) & 255, scales, shift), weights_of<F>((quad >> (16 * pair + 8)) & 255, scales, shift), to);
            }
        }
    }
}

// Gathers pairs of four rows each. Afterwards quarter q of rows[i + c], for i a multiple of four, has the pairs 4 * q + c of rows
// i .. i + 3.
template <int ROWS>
inline void gather_fours(__m512i (&rows)[ROWS]) {
    __m512i twos[ROWS];
    for (int i = 0; i < ROWS; i += 2) {
        twos[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        twos[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < ROWS; i += 4)
        for (int half = 0; half < 2; half++) {
            rows[i + 2 * half] = _mm512_unpacklo_epi64(twos[i + half], twos[i + half + 2]);
            rows[i + 2 * half + 1] = _mm512_unpackhi_epi64(twos[i + half], twos[i + half + 2]);
        }
}

// Transposes 16 x 16 pairs.
inline void transpose_pairs(__m512i (&rows)[LANES]) {
    __m512i eights[LANES];
    gather_fours<LANES>(rows);
    for (int i = 0; i < LANES; i += 8)
        for (int c = 0; c < 4; c++) {
            eights[i + c] = _mm512_shuffle_i32x4(rows[i + c], rows[i + c + 4], 0x88);      // pairs c and c + 8 of eight rows
            eights[i + c + 4] = _mm512_shuffle_i32x4(rows[i + c], rows[i + c + 4], 0xdd);  // pairs c + 4 and c + 12
        }
    for (int c = 0; c < LANES / 2; c++) {
        rows[c] = _mm512_shuffle_i32x4(eights[c], eights[c + 8], 0x88);
        rows[c + 8] = _mm512_shuffle_i32x4(eights[c], eights[c + 8], 0xdd);
    }
}

// Copies columns of a group of dense rows; rows that the matrix does not have are its last one again.
void copy_group(const uint8_t* first, int rows, int columns, Range part, uint8_t* to) {
    for (int column = part.begin; column < part.end; column += BLOCK_COLUMNS, to += LANES * PAIR_NBYTES) {
        __m512i pairs[LANES];
        for (int lane = 0; lane < LANES; lane++)
            pairs[lane] = load<__m512i>(first + (size_t(std::min(lane, rows - 1)) * columns + column) * 2);
        transpose_pairs(pairs);
        for (int pair = 0; pair < LANES; pair++) store(to + pair * PAIR_NBYTES, pairs[pair]);
    }
}

using FillGroup = void (*)(const uint8_t* group, int columns, Range blocks, float scale, uint8_t* to);

#define GRAPHCORE_FILL(F) fill_group<F>,
constexpr FillGroup FILL[] = {GRAPHCORE_FORMATS(GRAPHCORE_FILL)};

bool has_avx512_bf16() {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1 << 5);
}

// Asks Linux for AMX's registers, which it gives a process on request only. A virtual machine may list AMX without having it.
bool may_use_amx() {
#if GRAPHCORE_AMX
    constexpr unsigned BF16 = 1 << 22, TILE = 1 << 24;
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    unsigned a, b, c, d;
    const bool has = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & BF16) && (d & TILE);
    return has && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return false;
#endif
}

// Asked when the library is loaded: it takes microseconds on a virtual machine.
const bool HAS_BF16_PAIRS = has_avx512_bf16(), HAS_AMX = HAS_BF16_PAIRS && may_use_amx();

// The operand of ldtilecfg: all eight registers with sixteen rows of 64 bytes.
struct alignas(64) Shapes {
    uint8_t palette = 1, start_row = 0, unused[14] = {};
    uint16_t row_nbytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
constexpr Shapes SHAPES;

}  // namespace

bool has_bf16_pairs() { return HAS_BF16_PAIRS; }
bool has_amx() { return HAS_AMX; }

void arrange_tile(const uint8_t* x, int tokens, int columns, uint32_t* tile) {
    const __m512i lows = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), highs = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    for (int column = 0; column < columns; column += BLOCK_COLUMNS, tile += LANES * PANEL_TOKENS) {
        __m512i rows[PANEL_TOKENS];
        for (int t = 0; t < PANEL_TOKENS; t++) rows[t] = t < tokens ? load<__m512i>(x + (size_t(t) * columns + column) * 2) : __m512i{};
        gather_fours<PANEL_TOKENS>(rows);
        for (int c = 0; c < 4; c++) {
            const __m512i low = _mm512_permutex2var_epi64(rows[c], lows, rows[c + 4]), high = _mm512_permutex2var_epi64(rows[c], highs, rows[c + 4]);
            store(tile + PANEL_TOKENS * c, _mm512_castsi512_si256(low));
            store(tile + PANEL_TOKENS * (c + 4), _mm512_extracti64x4_epi64(low, 1));
            store(tile + PANEL_TOKENS * (c + 8), _mm512_castsi512_si256(high));
            store(tile + PANEL_TOKENS * (c + 12), _mm512_extracti64x4_epi64(high, 1));
        }
    }
}

void arrange_amx_tile(const uint8_t* x, int tokens, int columns, uint32_t* tile) {
    for (int column = 0; column < columns; column += BLOCK_COLUMNS)
        for (int t = 0; t < AMX_TOKENS; t++, tile += LANES)
            store(tile, t < tokens ? load<__m512i>(x + (size_t(t) * columns + column) * 2) : __m512i{});
}

#if GRAPHCORE_AMX
// GCC 12 drops the target of a constructor, so these two are functions.
AMX_TARGET static void store_shapes(void* to) { _tile_storeconfig(to); }
AMX_TARGET static void load_shapes(const void* from) { _tile_loadconfig(from); }

AmxShapes::AmxShapes() {
    store_shapes(found_);
    load_shapes(&SHAPES);
}

AmxShapes::~AmxShapes() { load_shapes(found_); }

AMX_TARGET void multiply_amx_panel(const uint8_t* panel, const uint32_t* tile, int pairs, float* sums) {
    constexpr int SUMS_NBYTES = PANEL_ROWS * 4;
    float* others = sums + LANES * PANEL_ROWS;  // of the tile's last sixteen tokens
    _tile_loadd(0, sums, SUMS_NBYTES);
    _tile_loadd(1, sums + LANES, SUMS_NBYTES);
    _tile_loadd(2, others, SUMS_NBYTES);
    _tile_loadd(3, others + LANES, SUMS_NBYTES);
    for (int pair = 0; pair < pairs; pair += LANES, panel += LANES * PAIR_NBYTES, tile += AMX_TOKENS * LANES) {
        _tile_loadd(4, tile, VECTOR_NBYTES);
        _tile_loadd(6, panel, PAIR_NBYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, panel + VECTOR_NBYTES, PAIR_NBYTES);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, tile + LANES * LANES, VECTOR_NBYTES);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, SUMS_NBYTES);
    _tile_stored(1, sums + LANES, SUMS_NBYTES);
    _tile_stored(2, others, SUMS_NBYTES);
    _tile_stored(3, others + LANES, SUMS_NBYTES);
}
#else
AmxShapes::AmxShapes() {}
AmxShapes::~AmxShapes() {}
void multiply_amx_panel(const uint8_t*, const uint32_t*, int, float*) {}
#endif

void fill_panel(const Matrix& matrix, int group, Range columns, int place, uint8_t* panel) {
    uint8_t* to = panel + place * VECTOR_NBYTES;
    const int row = group * GROUP_ROWS;
    if (matrix.format == BF16) return copy_group(matrix.bytes + size_t(row) * matrix.columns * 2, matrix.rows - row, matrix.columns, columns, to);
    const uint8_t* bytes = matrix.bytes + group * format_ops(matrix.format).group_nbytes(matrix.columns);
    FILL[matrix.format - DENSE_FORMATS](bytes, matrix.columns, {columns.begin / BLOCK_COLUMNS, columns.end / BLOCK_COLUMNS}, matrix.scale, to);
}

BF16_TARGET void multiply_panel(const uint8_t* panel, const uint32_t* tile, int pairs, float* sums) {
    __m512 all[PANEL_TOKENS][PANEL_GROUPS];
    for (int t = 0; t < PANEL_TOKENS; t++)
        for (int i = 0; i < PANEL_GROUPS; i++) all[t][i] = _mm512_loadu_ps(sums + t * PANEL_ROWS + i * LANES);
    for (int pair = 0; pair < pairs; pair++) {
        __m512bh weights[PANEL_GROUPS];
        for (int i = 0; i < PANEL_GROUPS; i++) weights[i] = (__m512bh)load<__m512i>(panel + size_t(pair) * PAIR_NBYTES + i * VECTOR_NBYTES);
#pragma GCC unroll 8
        for (int t = 0; t < PANEL_TOKENS; t++) {
            const __m512bh x = (__m512bh)_mm512_set1_epi32(int(tile[PANEL_TOKENS * pair + t]));
            for (int i = 0; i < PANEL_GROUPS; i++) all[t][i] = _mm512_dpbf16_ps(all[t][i], weights[i], x);
        }
    }
    for (int t = 0; t < PANEL_TOKENS; t++)
        for (int i = 0; i < PANEL_GROUPS; i++) _mm512_storeu_ps(sums + t * PANEL_ROWS + i * LANES, all[t][i]);
}

void arrange_keys(const uint8_t* const keys[LANES], int head_dim, uint32_t* to) {
    for (int e = 0; e < head_dim; e += BLOCK_COLUMNS, to += LANES * LANES) {
        __m512i pairs[LANES];
        for (int key = 0; key < LANES; key++) pairs[key] = load<__m512i>(keys[key] + 2 * e);
        transpose_pairs(pairs);
        for (int pair = 0; pair < LANES; pair++) store(to + LANES * pair, pairs[pair]);
    }
}

void arrange_values(const uint8_t* const values[LANES], int head_dim, uint32_t* to) {
    for (int pair = 0; pair < LANES / 2; pair++, to += head_dim)
        for (int e = 0; e < head_dim; e += LANES) {
            const __m512i first = _mm512_cvtepu16_epi32(load<__m256i>(values[2 * pair] + 2 * e));
            const __m512i second = _mm512_cvtepu16_epi32(load<__m256i>(values[2 * pair + 1] + 2 * e));
            store(to + e, _mm512_or_si512(first, _mm512_slli_epi32(second, 16)));
        }
}

BF16_TARGET void score_pairs(const uint8_t* q, int head_dim, const uint32_t* keys, float scale, size_t stride, float* scores) {
    __m512 all[PAIR_ROWS][2];
    for (int r = 0; r < PAIR_ROWS; r++) all[r][0] = all[r][1] = _mm512_setzero_ps();
    const uint32_t* others = keys + LANES * head_dim / 2;
    for (int pair = 0; pair < head_dim / 2; pair++) {
        const __m512bh first = (__m512bh)load<__m512i>(keys + LANES * pair), second = (__m512bh)load<__m512i>(others + LANES * pair);
#pragma GCC unroll 8
        for (int r = 0; r < PAIR_ROWS; r++) {
            const __m512bh x = (__m512bh)_mm512_set1_epi32(load<int>(q + size_t(2) * (r * head_dim + 2 * pair)));
            all[r][0] = _mm512_dpbf16_ps(all[r][0], first, x);
            all[r][1] = _mm512_dpbf16_ps(all[r][1], second, x);
        }
    }
    for (int r = 0; r < PAIR_ROWS; r++)
        for (int half = 0; half < 2; half++) _mm512_storeu_ps(scores + r * stride + half * LANES, _mm512_mul_ps(all[r][half], _mm512_set1_ps(scale)));
}

template <int WIDTH>
BF16_TARGET inline void add_features_of_pairs(const uint8_t* weights, size_t stride, const uint32_t* values, int head_dim, int begin, int end, float* out) {
    constexpr int ROWS = 4;
    __m512 all[ROWS][WIDTH];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < WIDTH; v++) all[r][v] = _mm512_loadu_ps(out + r * head_dim + v * LANES);
    for (int pair = begin; pair < end; pair++) {
        __m512bh parts[WIDTH];
        for (int v = 0; v < WIDTH; v++) parts[v] = (__m512bh)load<__m512i>(values + size_t(pair) * head_dim + v * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
            const __m512bh weight = (__m512bh)_mm512_set1_epi32(load<int>(weights + r * stride + 4 * size_t(pair)));
            for (int v = 0; v < WIDTH; v++) all[r][v] = _mm512_dpbf16_ps(all[r][v], parts[v], weight);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < WIDTH; v++) _mm512_storeu_ps(out + r * head_dim + v * LANES, all[r][v]);
}

void add_weighted_pairs(const uint8_t* weights, size_t stride, const uint32_t* values, int head_dim, int begin, int end, float* out) {
    int e = 0;
    for (; e + 4 * LANES <= head_dim; e += 4 * LANES) add_features_of_pairs<4>(weights, stride, values + e, head_dim, begin, end, out + e);
    if (e < head_dim) add_features_of_pairs<2>(weights, stride, values + e, head_dim, begin, end, out + e);  // half of that
}

}  // namespace graphcore

#else

namespace graphcore {

bool has_bf16_pairs() { return false; }
bool has_amx() { return false; }
void arrange_tile(const uint8_t*, int, int, uint32_t*) {}
void arrange_amx_tile(const uint8_t*, int, int, uint32_t*) {}
void fill_panel(const Matrix&, int, Range, int, uint8_t*) {}
void multiply_panel(const uint8_t*, const uint32_t*, int, float*) {}
void multiply_amx_panel(const uint8_t*, const uint32_t*, int, float*) {}
AmxShapes::AmxShapes() {}
AmxShapes::~AmxShapes() {}
void arrange_keys(const uint8_t* const*, int, uint32_t*) {}
void arrange_values(const uint8_t* const*, int, uint32_t*) {}
void score_pairs(const uint8_t*, int, const uint32_t*, float, size_t, float*) {}
void add_weighted_pairs(const uint8_t*, size_t, const uint32_t*, int, int, int, float*) {}

}  // namespace graphcore
#endif
