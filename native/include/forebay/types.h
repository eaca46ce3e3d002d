// The core's vocabulary: element types, hyperparameters and the addresses of one part of a model.
// Plain values only; nothing here owns memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace forebay {

// An address in host or device memory. The core never owns what it points at: the caller keeps
// the memory alive until the ticket of the work that uses it has ended.
using Address = std::uintptr_t;

// Handles of the accelerator's driver; 0 where there is none (host copies).
using Stream = std::uintptr_t;
using Event = std::uintptr_t;

enum class DType { float32, bfloat16, float16 };

constexpr std::size_t item_bytes(DType dtype) noexcept { return dtype == DType::float32 ? 4 : 2; }

// How weight decay enters: p *= decay before the step, g += decay * p, or not at all.
enum class DecayMode { decoupled, l2, none };

// Numbers of one Adam step, computed by the caller in double and rounded once to float.
struct Hyper {
    DecayMode decay_mode = DecayMode::none;
    float decay = 0.0F;  // decoupled: 1 - lr * weight_decay; l2: weight_decay
    float one_minus_beta1 = 0.0F;
    float beta2 = 0.0F;
    float one_minus_beta2 = 0.0F;
    float eps = 0.0F;
    float bias_correction2_sqrt = 1.0F;
    float step_size = 0.0F;
};

// Where the fp32 master lives: in one fp32 array, or as a bf16 weight plus 16 bits beside it.
enum class MasterLayout { whole, split };

// A run of elements that share one Hyper, in the part's element offsets.
struct Segment {
    std::size_t offset = 0;
    std::size_t elements = 0;
};

// Base addresses of one part. Every role uses the same element offsets: element e of a role with
// base B and item size s lies at B + e * s.
struct PartState {
    Address grad = 0;
    DType grad_dtype = DType::float32;
    MasterLayout master_layout = MasterLayout::whole;
    Address master = 0;  // fp32 array, or the bf16 high halves
    Address low = 0;     // uint16 array in the split layout, else 0
    Address exp_avg = 0;
    Address exp_avg_sq = 0;
    Address out = 0;  // 0: no weight is written beside the master
    DType out_dtype = DType::float32;
    std::vector<Segment> segments;
    std::size_t elements = 0;
};

// Where the state of a part is read from when the update writes another one; all 0: in place.
struct StateSource {
    Address master = 0;
    Address low = 0;
    Address exp_avg = 0;
    Address exp_avg_sq = 0;
};

// accumulator (fp32) takes or adds `elements` of source.
struct FoldSpan {
    Address accumulator = 0;
    Address source = 0;
    std::size_t elements = 0;
};

struct ElementSpan {
    Address address = 0;
    std::size_t elements = 0;
};

// One contiguous copy.
struct CopySpan {
    Address destination = 0;
    Address source = 0;
    std::size_t bytes = 0;
};

}  // namespace forebay
