// A decode step of one sequence as a list of instructions over fixed buffers.
//
//     embed | for each block: linear (norm, q k v) | attend | linear (o) | linear (norm, gate up) | linear (down) | head | choose
//
// An instruction is a phase of the team's job. What every thread needs of its input (the norm, the rounding to eight bits)
// each thread computes for itself: that is cheaper than a phase of its own. Activations are float32 throughout. The structs
// are mirrored in graphcore/kernels/instructions.py.
#pragma once

#include "matrix.h"

namespace graphcore {

enum class NormKind : int32_t { NONE = 0, RMS = 1, LAYER = 2 };
enum class Activation : int32_t { NONE = 0, SILU = 1, GELU = 2, GELU_TANH = 3, RELU = 4, RELU2 = 5, SIGMOID = 6, CLAMPED_SWIGLU = 7 };
enum class Store : int32_t { PUT = 0, ADD = 1, GATED = 2 };
enum class Kind : int32_t { EMBED = 0, PROJECT = 1, ATTEND = 2, ADD_NORM = 3, CHOOSE = 4, ADVANCE = 5, ROUTE = 6, EXPERTS_UP = 7, EXPERTS_DOWN = 8, ELEMENTWISE = 9 };
enum class Elements : int32_t { GATE = 0, ADD = 1, CAP = 2 };

struct Norm {
    NormKind kind;
    float eps;
    const float* weight;
    const float* bias;
};

// x = row of the table * scale (+ row of the position table)
struct Embed {
    Matrix table, positions;  // positions.bytes is null where there are none
    const int64_t* token_id;
    const int64_t* position;
    float* x;
    float scale;
};

// out = matrix @ norm(x) + bias for up to three matrices; what becomes of it is `store`'s to say.
struct Project {
    const float* x;
    Norm norm;
    Rounding rounding;
    int32_t num_matrices;
    Matrix matrices[3];
    const float* biases[3];
    float* outs[3];
    Store store;            // PUT: out = f(y);  ADD: out += y;  GATED: out[0] = f(y0) * y1
    Activation activation;  // f
};

// Normalises, rotates and caches the new key; attends the live slots. Slot of position p: p mod slots.
struct Attend {
    const float *q, *k, *v;
    Norm q_norm, k_norm;
    const float* rope;  // [positions, 2, (head_dim - unrotated) / 2], or null
    const float* sinks; // [heads], or null
    const int64_t* position;
    uint8_t *k_cache, *v_cache;  // [kv_heads, slots, head_dim]
    float* out;                  // [heads, head_dim]
    int32_t heads, kv_heads, head_dim, slots, window, cache_format;
    int32_t unrotated;  // features of a head, the last ones, that the rotation leaves alone
    float scale;
    float cap;  // scores become cap * tanh(score / cap); 0: they stay
};

// x += norm(y)
struct AddNorm {
    const float* y;
    Norm norm;
    float* x;
    int32_t dim;
};

constexpr int CHOICE_PARTS = 64;  // that the vocabulary is cut into for the choice of a token

// The index of each part's largest logit; the first of equal ones.
struct Choose {
    const float* logits;
    int32_t vocab;
    float* best;         // [CHOICE_PARTS]
    int64_t* best_index; // [CHOICE_PARTS]
};

struct Advance {
    const float* best;
    const int64_t* best_index;
    int64_t *chosen, *token_id, *position;
};

// The experts of one token: the `used` largest of the router's logits and the softmax over those.
struct Route {
    const float* logits;
    int32_t experts, used;
    int32_t* chosen;   // [used]
    float* weights;    // [used]
};

// hidden[k] = f(gate_e x + b, up_e x + b) for each chosen expert e;  x is normalised here. The matrices of chosen[k] lie
// at places[k], its biases at chosen[k].
struct ExpertsUp {
    const float* x;
    Norm norm;
    Rounding rounding;
    Matrix gate, up;  // at the first place; the others follow, each of whole groups of rows
    const float *gate_bias, *up_bias;
    const int32_t *chosen, *places;
    float* hidden;  // [used, rows]
    int32_t used;
    float limit, alpha;
};

// x += sum over k of weights[k] * (down_e hidden[k] + b)
struct ExpertsDown {
    const float* hidden;
    Rounding rounding;
    Matrix down;
    const float* bias;
    const int32_t *chosen, *places;
    const float* weights;
    float* x;
    int32_t used;
};

// GATE: out = f(a) * b;  ADD: out = a + factor * b;  CAP: out = factor * tanh(a / factor).  out may be a or b.
struct Elementwise {
    Elements elements;
    Activation activation;  // f
    const float *a, *b;
    float* out;
    int32_t size;
    float factor;
};

struct Instruction {
    Kind kind;
    const void* arguments;
};

// A thread's own memory.
struct Scratch {
    Activations activations;
    float* row;  // as long as the longest row, or the scores of all heads that share keys
};

// What of an instruction can be done side by side.
Deal deal_of(const Instruction& instruction, int threads);
// What a thread computes for itself before its first units.
void enter_instruction(const Instruction& instruction, Scratch& scratch);
void run_units(const Instruction& instruction, Range units, Scratch& scratch);

}  // namespace graphcore
