// Packs sixteen stored rows in the kernels' layout, for every format; see stored.h.
#include "matrix.h"
#include "stored.h"

namespace graphcore {

template <class F>
void pack_group(const uint8_t* const rows[GROUP_ROWS], int columns, uint8_t* group) {
    constexpr int BLOCKS = F::COLUMNS / BLOCK_COLUMNS;
    for (int index = 0; index < columns / F::COLUMNS; index++) {
        const int first = index * BLOCKS, within = first % CHUNK_BLOCKS;
        const Stretch<F> here(group, columns, first / CHUNK_BLOCKS);
        const Stored<F> block{Rows{rows, size_t(index) * F::RAW_NBYTES}};
        uint8_t* to = group + (here.codes_of(within) - group);
        uint8_t* meta = group + (here.meta_of(within) - group);
        if (F::META_NBYTES && within == 0) store(to - VECTOR_NBYTES, u8x64{});  // the scales' last vector may end in padding
        block.scales(meta);
        for (int b = 0; b < BLOCKS; b++, to += Codes<F::BITS>::NBYTES) {
            for (int from = 0; from < VECTOR_NBYTES; from += NATIVE_NBYTES) {
                Bytes quads[QUADS];
                block.codes(b, from, quads);
                Codes<F::BITS>::pack(quads, to + from);
            }
        }
    }
}

#define GRAPHCORE_PACK(F) template void pack_group<F>(const uint8_t* const rows[GROUP_ROWS], int columns, uint8_t* group);
GRAPHCORE_FORMATS(GRAPHCORE_PACK)

}  // namespace graphcore
