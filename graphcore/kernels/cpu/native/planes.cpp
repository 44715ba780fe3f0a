// Packs rows of the formats of levels in a GPU's planes: low codes, high codes, scales, supers of sixteen rows, each plane
// row by row (graphcore/kernels/gpu/layout.py and quant/level_formats.py have pictures). A device's reading threads call it,
// so it runs on the caller's thread.
#include "planes.h"

#include <type_traits>

#include "matrix.h"
#include "stored.h"

namespace graphcore {

namespace {

constexpr int SUPER_COLUMNS = 256;  // columns of a stored block

// Bytes of a block's row in each plane.
template <int BITS>
struct PlaneBytes {
    static constexpr int LOW = BITS == 3 ? 64 : 128, HIGH = BITS == 3 ? 32 : 0, SCALES = BITS == 3 ? 16 : 8, SUPERS = 2;
};

// Writes a row's low two bits, four columns in a byte and a half of the block after the other, and its signs in a plane of
// their own.
inline void put_three_bits(const GridCodes<3>& block, int lane, uint8_t* low, uint8_t* high) {
    std::memset(low, 0, PlaneBytes<3>::LOW);
    std::memset(high, 0, PlaneBytes<3>::HIGH);
    for (int part = 0; part < CHUNK_BLOCKS; part++) {
        uint8_t numbers[BLOCK_COLUMNS];
        for (int quad = 0; quad < QUADS; quad++) std::memcpy(numbers + 4 * quad, block.words[part][quad] + 4 * lane, 4);
        const uint32_t signs = block.signs[part][lane];
        uint8_t* const half = low + part / 4 * BLOCK_COLUMNS;
        for (int i = 0; i < BLOCK_COLUMNS; i++) {
            half[i] = uint8_t(half[i] | numbers[i] << (2 * (part % 4)));
            high[i] = uint8_t(high[i] | (signs >> i & 1) << part);
        }
    }
}

// Writes a row's codes, two columns in a byte, sixteen apart.
inline void put_four_bits(const GridCodes<4>& block, int lane, uint8_t* low) {
    for (int part = 0; part < CHUNK_BLOCKS; part++) {
        uint8_t codes[BLOCK_COLUMNS];
        for (int quad = 0; quad < QUADS; quad++) std::memcpy(codes + 4 * quad, block.words[part][quad] + 4 * lane, 4);
        const uint32_t signs = block.signs[part][lane];
        for (int i = 0; i < BLOCK_COLUMNS; i++) codes[i] = uint8_t(codes[i] | (signs >> i & 1) << 3);
        for (int i = 0; i < BLOCK_COLUMNS / 2; i++)
            low[part * BLOCK_COLUMNS / 2 + i] = uint8_t(codes[i] | codes[BLOCK_COLUMNS / 2 + i] << 4);
    }
}

template <class F>
void put_scales(const Stored<F>& block, int lane, uint8_t* scales) {
    constexpr int PARTS = F::HALVES ? 16 : 8, EACH = PlaneBytes<F::BITS>::SCALES / PARTS;
    for (int part = 0; part < PARTS; part++) {
        const int scale = block.fours[part / 2][lane] >> (4 * (part % 2)) & 15;
        for (int i = 0; i < EACH; i++) scales[part * EACH + i] = uint8_t(2 * scale + 1);
    }
}

template <class F>
void pack_group_planes(const uint8_t* const rows[GROUP_ROWS], int lanes, int columns, uint8_t* group) {
    using Sizes = PlaneBytes<F::BITS>;
    const size_t blocks = size_t(columns / SUPER_COLUMNS), all = GROUP_ROWS * blocks;
    uint8_t* const high = group + all * Sizes::LOW;
    uint8_t* const scales = high + all * Sizes::HIGH;
    uint8_t* const supers = scales + all * Sizes::SCALES;
    for (size_t index = 0; index < blocks; index++) {
        const Stored<F> block{Rows{rows, index * F::RAW_NBYTES}};
        for (int lane = 0; lane < lanes; lane++) {
            const size_t at = lane * blocks + index;
            if constexpr (F::BITS == 3)
                put_three_bits(block, lane, group + at * Sizes::LOW, high + at * Sizes::HIGH);
            else
                put_four_bits(block, lane, group + at * Sizes::LOW);
            put_scales<F>(block, lane, scales + at * Sizes::SCALES);
            std::memcpy(supers + at * Sizes::SUPERS, block.unit + lane, Sizes::SUPERS);
        }
    }
}

using PackPlanes = void (*)(const uint8_t* const rows[GROUP_ROWS], int lanes, int columns, uint8_t* group);

// Returns the function of a format of levels; null for others, whose planes are made by copying fields.
template <class F>
constexpr PackPlanes planes_of() {
    if constexpr (std::is_base_of_v<GridCodes<F::BITS>, Stored<F>>)
        return pack_group_planes<F>;
    else
        return nullptr;
}

struct Planes {
    PackPlanes pack;
    size_t raw_nbytes, nbytes;  // of a block's row in the file, and in all planes
};

template <class F>
constexpr Planes entry() {
    using Sizes = PlaneBytes<F::BITS == 3 ? 3 : 4>;
    return {planes_of<F>(), size_t(F::RAW_NBYTES), size_t(Sizes::LOW + Sizes::HIGH + Sizes::SCALES + Sizes::SUPERS)};
}

#define GRAPHCORE_PLANES(F) entry<F>(),
constexpr Planes PLANES[] = {GRAPHCORE_FORMATS(GRAPHCORE_PLANES)};

}  // namespace

void pack_level_planes(int format, int rows, int columns, const uint8_t* raw, size_t stride, uint8_t* planes) {
    const Planes& one = PLANES[format - DENSE_FORMATS];
    const size_t group_nbytes = GROUP_ROWS * size_t(columns / SUPER_COLUMNS) * one.nbytes;
    for (int first = 0; first < rows; first += GROUP_ROWS, planes += group_nbytes) {
        const uint8_t* lanes[GROUP_ROWS];
        const int count = rows - first < GROUP_ROWS ? rows - first : GROUP_ROWS;
        for (int lane = 0; lane < GROUP_ROWS; lane++) lanes[lane] = raw + size_t(first + (lane < count ? lane : 0)) * stride;
        one.pack(lanes, count, columns, planes);
    }
}

}  // namespace graphcore
