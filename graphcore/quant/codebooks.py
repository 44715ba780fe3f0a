"""Tables of the values that four-bit codes stand for, where they are not evenly spaced."""

# E2M1 times 2, so that all are whole: sign bit, two exponent bits, one mantissa bit. ggml has +0 for code 8 (OCP: -0).
# Source: OCP Microscaling Formats v1.0, section 5.3.3; ggml/src/ggml-common.h, kvalues_mxfp4.
E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

# Non-linear four-bit levels. Source: ggml/src/ggml-common.h, kvalues_iq4nl.
IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
