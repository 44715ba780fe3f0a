// A decode step of up to sixteen tokens as a list of instructions over fixed buffers.
//
//     embed | for each block: linear (norm, q k v) | attend | linear (o) | linear (norm, gate up) | linear (down) | head | choose
//
// An instruction is one phase of the team's job. Every thread normalises and rounds the whole input of a product itself,
// because this is faster than another phase. Activations are float32 throughout. graphcore/kernels/cpu/instructions.py
// mirrors the structs.
//
// A program has a fixed number of rows, each for one token; a run computes those that have one. Weights are read once for all
// rows, and a row's results do not depend on rows of other sequences. Rows of one sequence are adjacent, at consecutive
// positions, and get the same results as in separate runs: each attends the cache as it was before the run, the sequence's
// earlier rows, and itself. Recurrent states process these rows in order.
#pragma once

#include "matrix.h"

namespace graphcore {

enum class NormKind : int32_t { NONE = 0, RMS = 1, LAYER = 2 };
enum class Activation : int32_t { NONE = 0, SILU = 1, GELU = 2, GELU_TANH = 3, RELU = 4, RELU2 = 5, SIGMOID = 6, CLAMPED_SWIGLU = 7 };
enum class Store : int32_t { PUT = 0, ADD = 1, GATED = 2 };
enum class Kind : int32_t { EMBED = 0, PROJECT = 1, ATTEND = 2, ADD_NORM = 3, CHOOSE = 4, ADVANCE = 5, ROUTE = 6, EXPERTS_UP = 7, EXPERTS_DOWN = 8, ELEMENTWISE = 9, CONVOLVE = 10, DELTA_RULE = 11, REORDER = 12, GATED_CONVOLUTION = 13, PROJECT_HEADS = 14 };
enum class Elements : int32_t { GATE = 0, ADD = 1, CAP = 2, SCALE = 3 };

constexpr int MOST_ROWS = 16;    // largest number of a program's rows
constexpr int DOWN_GROUPS = 32;  // groups of rows whose expert outputs are buffered before they are summed

// The rows that have a token in a run, in order.
struct Rows {
    int count = 0, num_sequences = 0;
    int index[MOST_ROWS];        // each row's index in the program
    int earlier[MOST_ROWS];      // for each row, the number of rows before it that belong to its sequence
    int begins[MOST_ROWS + 1];   // where each sequence's rows begin in `index`, and the end of the last ones

    // counts: 1 for a row that has a token, else 0.  sequences: each row's sequence.
    Rows(const int64_t* counts, const int64_t* sequences, int num_rows) {
        for (int row = 0; row < num_rows; row++) {
            if (!counts[row]) continue;
            const bool goes_on = count && sequences[row] == sequences[index[count - 1]];
            if (!goes_on) begins[num_sequences++] = count;
            earlier[count] = goes_on ? earlier[count - 1] + 1 : 0;
            index[count++] = row;
        }
        begins[num_sequences] = count;
    }
};

// One array per row of a program. stride: elements between two rows' arrays; 0 if all rows share one.
template <class T>
struct PerRow {
    T* first;  // may be null
    int64_t stride;

    T* at(int row) const { return first + row * stride; }
    explicit operator bool() const { return first; }
};

struct Norm {
    NormKind kind;
    float eps;
    const float* weight;  // null: no weight
    const float* bias;
};

// x = row of the table * scale (+ row of the position table).
struct Embed {
    Matrix table, positions;  // positions.bytes is null if there is no position table
    const int64_t *token_ids, *starts;  // [rows]; starts: the tokens' positions
    PerRow<float> x;
    float scale;
};

// y = matrix @ norm(x) + bias for up to four matrices. `store` says how y is stored.
struct Project {
    PerRow<const float> x;
    Norm norm;
    Rounding rounding;
    int32_t num_matrices;
    Matrix matrices[4];
    const float* biases[4];
    PerRow<float> outs[4];
    Store store;            // PUT: out = f(y);  ADD: out += y;  GATED: out[0] = f(y0) * y1
    Activation activation;  // f
    float factor;           // factor of f(y) or y for PUT and ADD; 0: none
};

// Attention of one token of each row: normalises and rotates queries and the new key, writes the new key and value to the
// sequence's pages, and attends to the live keys (attend.h maps positions to slots). If k is null, another layer has written
// the tokens' entries. For n rows of one sequence, its ring of pages has at least window + n - 1 slots, or has not wrapped
// yet: the last row must not overwrite a key that the first one sees.
struct Attend {
    PerRow<const float> q, k, v;
    Norm q_norm, k_norm, v_norm;
    const float* rope;  // [positions, 2, (head_dim - unrotated) / 2], or null
    const float* sinks; // [heads], or null
    const int64_t *starts, *sequences;  // [rows]: the token's position, and the sequence's index in the caches
    uint8_t *k_cache, *v_cache;         // [pages, kv_heads, page entries] of k_format and of v_format
    const int32_t* table;               // [sequences, num_pages]: pages of each sequence
    PerRow<float> out;                  // [heads, head_dim]
    int32_t heads, kv_heads, head_dim, page, num_pages, window, k_format, v_format;
    int32_t unrotated;  // last features of a head that are not rotated
    // 0, or the first feature of the value in an entry of k_cache, which v_cache then points to, too: latent attention. k has
    // the features before it, v those from it on, and `out` has [heads, head_dim - values_from].
    int32_t values_from;
    int32_t period;     // positions whose queries have the same factor; 0: queries have none
    float scale;
    float cap;   // scores become cap * tanh(score / cap); 0: no cap
    float beta;  // queries at position p are multiplied by 1 + beta * log(1 + p / period)
};

// x += norm(y), for each of `parts` parts of x and y.
struct AddNorm {
    PerRow<const float> y;
    Norm norm;
    PerRow<float> x;
    int32_t dim;    // length of a part
    int32_t puts;   // 1: x = norm(y)
    int32_t parts;  // number of consecutive parts
};

constexpr int CHOICE_PARTS = 64;  // parts of the vocabulary, which threads search for the next token

// Finds each part's largest logit and its index; of equal logits the first.
struct Choose {
    PerRow<const float> logits;
    int32_t vocab;
    float* best;         // [rows, CHOICE_PARTS], infinity for a part with a logit that is not finite
    int64_t* best_index; // [rows, CHOICE_PARTS], -1 for such a part
};

// Takes the best of all parts as each row's next token, and advances the position.
struct Advance {
    const float* best;
    const int64_t* best_index;
    int64_t *chosen, *token_ids, *starts;  // [rows]
};

// The chosen experts of all rows that run, as lists per expert, so that rows share the read of an expert's weights. The k-th
// expert of the i-th row that runs is choice i * used + k.
struct Sharing {
    int32_t* count;    // number of distinct experts that were chosen
    int32_t* begins;   // [rows * used + 1], index in `choices` of each expert's first choice
    int32_t* choices;  // [rows * used]
};

enum class Scores : int32_t { NONE = 0, SOFTMAX = 1, SIGMOID = 2 };

// Chooses the experts of each row: those with the `used` largest router logits. Their weights are the softmax over these
// logits, or their values in the softmax over all logits. With a score function, those with the `used` largest sums of score
// and bias within the best groups are chosen, and their weights are their scores.
struct Route {
    PerRow<const float> logits;
    int32_t experts, used;
    int32_t* chosen;   // [rows, used]
    float* weights;    // [rows, used]
    int32_t over_all;  // 1: the softmax is over all logits
    const float* scales;  // [experts], factors of the weights, or null
    Sharing sharing;
    Scores function;      // function from logits to scores; the following fields are used only with one
    const float* bias;    // [experts], or null
    int32_t groups;       // number of equal groups of consecutive experts
    int32_t used_groups;  // number of groups to choose from: those whose best experts have the largest sums
    int32_t normalises;   // 1: weights are divided by their sum plus `eps`
    float eps, factor;    // factor of the weights
    int32_t ranked_by;    // number of a group's best experts in its sum: 1 or 2
};

// hidden[k] = f(gate_e norm(x) + b) * (up_e norm(x) + b), or the clamped SwiGLU of the two products, for each chosen expert
// e = chosen[k]. places[k] is the index of the expert's matrices in memory, chosen[k] that of its biases. An expert without a
// place (-1) is skipped.
struct ExpertsUp {
    PerRow<const float> x;
    Norm norm;
    Rounding rounding;
    Matrix gate, up;  // matrices of place 0; those of other places follow, each padded to whole groups of rows
    const float *gate_bias, *up_bias;
    const int32_t *chosen, *places;  // [rows, used]
    Sharing sharing;
    PerRow<float> hidden;  // [used, rows of gate]
    int32_t used;
    Activation activation;  // f, or CLAMPED_SWIGLU
    float limit, alpha;     // of CLAMPED_SWIGLU
};

// x += sum over k of weights[k] * (down_e hidden[k] + b).
struct ExpertsDown {
    PerRow<const float> hidden;
    Rounding rounding;
    Matrix down;
    const float* bias;
    const int32_t *chosen, *places;  // [rows, used]
    Sharing sharing;
    const float* weights;            // [rows, used]
    PerRow<float> x;
    // If experts are fetched in several waves (batches): their outputs so far, [rows * used, groups, 16], and a flag that is 1
    // in the last wave, which sums them. Null if all experts are resident.
    float* answers;
    const int32_t* is_last;
    int32_t used;
    int32_t puts;  // 1: overwrites x instead of adding
};

// GATE: out = f(a) * b;  SCALE: the same with one number a;  ADD: out = a + factor * b;  CAP: out = factor * tanh(a / factor).
// out may be a or b.
struct Elementwise {
    Elements elements;
    Activation activation;  // f
    PerRow<const float> a, b;
    PerRow<float> out;
    int32_t size;
    float factor;
};

// A Gated DeltaNet layer between its projections, for any number of tokens. CONVOLVE writes `joined`, and DELTA_RULE reads it
// (delta.h). Both states are updated in place; a sequence that starts at 0 begins with zero states.
struct Delta {
    const uint8_t *mixed, *z, *a, *b;           // [sequences, tokens, channels | heads * value_dim | heads | heads] of format
    const float *conv_weight, *conv_bias;       // [channels, width], and [channels] or null
    const float *rate, *dt_bias, *norm_weight;  // [heads] twice, [value_dim]
    uint8_t* convolution;                       // [caches, channels, width - 1] of state_format
    float* recurrent;                           // [caches, heads, key_dim, value_dim]
    const int64_t *starts, *counts;             // [sequences]: position of the first token, number of real tokens
    float* joined;                              // [sequences, at most 64 tokens, channels]
    uint8_t* out;                               // [sequences, tokens, heads * value_dim] of format
    const int64_t* caches;                      // [sequences]: index of the sequence's states, or null if they are in order
    int64_t strides[4];                         // of mixed, z, a and b: elements between two tokens
    int32_t sequences, tokens, width, key_heads, heads, key_dim, value_dim, format, state_format;
    int32_t tiled;                              // 1: value head h belongs to key head h mod key_heads
    float eps;
};

// A gated short convolution between its projections, out = c * convolution(b * x), for any number of tokens (convolution.h).
// The state is updated in place; a sequence that starts at 0 begins with a state of zeros.
struct GatedConvolution {
    const uint8_t* mixed;                  // [sequences, tokens, 3 channels] of format: b, c and x of each token
    const float *conv_weight, *conv_bias;  // [channels, width], and [channels] or null
    uint8_t* convolution;                  // [caches, channels, width - 1] of state_format, the last inputs b * x
    const int64_t *starts, *counts;        // [sequences]: position of the first token, number of real tokens
    uint8_t* out;                          // [sequences, tokens, channels] of format
    const int64_t* caches;                 // [sequences]: index of the sequence's state, or null if they are in order
    int64_t stride;                        // elements of mixed between two tokens
    int32_t sequences, tokens, channels, width, format, state_format;
};

// out[i] = x[order[i]].
struct Reorder {
    PerRow<const float> x;
    const int32_t* order;  // [size], each below the length of x
    PerRow<float> out;
    int32_t size;
};

// out[h] = [prefix[h] | matrix_h @ x[h]] for each head: the heads of x, whose features are one after another, have matrices of
// their own.
struct ProjectHeads {
    PerRow<const float> x;       // [heads, columns of the matrix]
    PerRow<const float> prefix;  // [heads, prefix_dim]; null if prefix_dim is 0
    Rounding rounding;
    Matrix matrix;               // of the first head; those of others follow, each padded to whole groups of rows
    PerRow<float> out;           // [heads, prefix_dim + rows of the matrix]
    int32_t heads, prefix_dim;
};

struct Instruction {
    Kind kind;
    const void* arguments;
};

// The scratch memory of one thread.
struct Scratch {
    Activations activations;
    float* row;  // memory for the longest row, for attention (attend_floats) and for the delta rule (delta_floats)
};

// Returns the units of an instruction that threads can do in parallel.
Deal deal_of(const Instruction& instruction, const Rows& rows, int threads);
// Prepares a thread before its first units of an instruction.
void enter_instruction(const Instruction& instruction, const Rows& rows, Scratch& scratch);
// Carries out some units of an instruction.
void run_units(const Instruction& instruction, const Rows& rows, Range units, Scratch& scratch);

}  // namespace graphcore
