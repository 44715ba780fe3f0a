"""One module per stored encoding, each holding its Format as a constant; collected by `graphcore.quant.registry`.

Legend of all formats: N blocks, W bytes per block, E elements per block; d is the block's float16 scale. A layout lists
`offset name[bytes]`. Source of all layouts, unless stated otherwise: ggml/src/ggml-common.h (the block_* structs) and
ggml/src/ggml-quants.c (dequantize_row_*).
"""
