#include "forebay/update.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "forebay/crc32c.h"

namespace forebay {
namespace {

// 64 Ki elements read and write about 1.8 MB: some 50 microseconds of one core, long against the
// queue's lock and short against a piece.
constexpr std::size_t kChunkElements = kSumElements;
// Tile of the fused pass. Short enough for a core to overlap the conversions of one tile with the
// divisions of another: 1024 elements are 1.2 to 1.4 times slower with bf16 gradients.
constexpr std::size_t kTile = 256;
// Of an update from another state: 48 KiB, which are in a core's first cache when they are updated.
constexpr std::size_t kFillElements = 4096;

[[noreturn]] void refuse(const std::string& text) { throw std::invalid_argument(text); }

void check_address(const char* role, Address address, std::size_t item) {
    if (address == 0 || address % item != 0) {
        refuse("address of " + std::string(role) + " is " + std::to_string(address) +
               ", which must be non-zero and a multiple of " + std::to_string(item) + " bytes");
    }
}

void check_part(const PartState& part) {
    if (part.elements == 0) {
        return;
    }
    const bool split = part.master_layout == MasterLayout::split;
    check_address("master", part.master, split ? 2 : 4);
    check_address("exp_avg", part.exp_avg, 4);
    check_address("exp_avg_sq", part.exp_avg_sq, 4);
    if (split) {
        check_address("low", part.low, 2);
        if (part.out != 0) {
            refuse("a split master is itself the new weight: out must be 0, not " +
                   std::to_string(part.out));
        }
        return;
    }
    if (part.out != 0) {
        check_address("out", part.out, item_bytes(part.out_dtype));
        if (part.out == part.grad && item_bytes(part.out_dtype) > item_bytes(part.grad_dtype)) {
            refuse("out overwrites gradients still to be read: its items have " +
                   std::to_string(item_bytes(part.out_dtype)) + " bytes, the gradient's " +
                   std::to_string(item_bytes(part.grad_dtype)));
        }
    }
}

void check_segments(const PartState& part, const std::vector<std::size_t>& order) {
    std::size_t end = 0;
    for (const std::size_t index : order) {
        const Segment& segment = part.segments[index];
        if (segment.offset < end) {
            refuse("segment " + std::to_string(index) + " begins at element " +
                   std::to_string(segment.offset) + " inside another one that ends at " +
                   std::to_string(end));
        }
        if (segment.elements > part.elements || segment.offset > part.elements - segment.elements) {
            refuse("segment " + std::to_string(index) + " ends at element " +
                   std::to_string(segment.offset + segment.elements) + " of a part that has " +
                   std::to_string(part.elements));
        }
        end = segment.offset + segment.elements;
    }
}

void check_sums(const PartState& part, const UpdateRequest& request) {
    if (!request.names.empty() && request.names.size() != part.segments.size()) {
        refuse("names has " + std::to_string(request.names.size()) + " entries for " +
               std::to_string(part.segments.size()) + " segments");
    }
    if (request.sums == 0) {
        return;
    }
    check_address("sums", request.sums, sizeof(std::uint32_t));
    if (request.piece_elements % kSumElements != 0 && request.piece_elements < part.elements) {
        refuse("piece_elements is " + std::to_string(request.piece_elements) +
               ", which must be a multiple of the " + std::to_string(kSumElements) +
               " elements of a checksum");
    }
}

void check_source(const PartState& part, const UpdateRequest& request) {
    const StateSource& source = request.source;
    if (source.master == 0 || part.elements == 0) {
        return;
    }
    const bool split = part.master_layout == MasterLayout::split;
    check_address("source master", source.master, split ? 2 : 4);
    check_address("source exp_avg", source.exp_avg, 4);
    check_address("source exp_avg_sq", source.exp_avg_sq, 4);
    if (split) {
        check_address("source low", source.low, 2);
    }
    if (request.sums != 0 || (part.out != 0 && part.out == part.grad)) {
        refuse("an update from another state neither checks sums nor writes over the gradient");
    }
}

void check_request(const PartState& part, const UpdateRequest& request) {
    const std::size_t segments = part.segments.size();
    if (request.piece_elements == 0) {
        refuse("piece_elements must be at least 1, not 0");
    }
    if (request.hyper_of_segment.size() != segments) {
        refuse("hyper_of_segment has " + std::to_string(request.hyper_of_segment.size()) +
               " entries for " + std::to_string(segments) + " segments");
    }
    check_sums(part, request);
    check_source(part, request);
    if (!request.grads.empty() && request.grads.size() != segments) {
        refuse("grads has " + std::to_string(request.grads.size()) + " addresses for " +
               std::to_string(segments) + " segments");
    }
    for (std::size_t i = 0; i < segments; ++i) {
        const int hyper = request.hyper_of_segment[i];
        if (hyper < -1 || hyper >= static_cast<int>(request.hypers.size())) {
            refuse("segment " + std::to_string(i) + " names hyper " + std::to_string(hyper) +
                   " of " + std::to_string(request.hypers.size()));
        }
        if (hyper >= 0 && part.segments[i].elements > 0) {
            check_address("grad", request.grads.empty() ? part.grad : request.grads[i],
                          item_bytes(part.grad_dtype));
        }
    }
}

}  // namespace

UpdatePass::UpdatePass(const PartState& part, UpdateRequest request)
    : part_(part), request_(std::move(request)) {
    check_part(part_);
    check_request(part_, request_);
    pieces_ = part_.elements / request_.piece_elements +
              (part_.elements % request_.piece_elements != 0 ? 1 : 0);
    cut_into_runs();
    cut_into_chunks();
}

void UpdatePass::cut_into_runs() {
    std::vector<std::size_t> order(part_.segments.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
        return part_.segments[a].offset < part_.segments[b].offset;
    });
    check_segments(part_, order);
    for (const std::size_t index : order) {
        if (request_.hyper_of_segment[index] < 0) {
            continue;
        }
        std::size_t begin = part_.segments[index].offset;
        const std::size_t end = begin + part_.segments[index].elements;
        while (begin < end) {
            const std::size_t piece = begin / request_.piece_elements;
            const std::size_t piece_left =
                request_.piece_elements - begin % request_.piece_elements;
            std::size_t count = std::min({end - begin, kChunkElements, piece_left});
            if (request_.sums != 0) {
                count = std::min(count, kSumElements - begin % kSumElements);
            }
            runs_.push_back({index, piece, begin, begin + count});
            begin += count;
        }
    }
}

void UpdatePass::cut_into_chunks() {
    const bool whole_pieces = narrows_in_place();
    std::size_t elements = 0;
    for (std::size_t i = 0; i < runs_.size(); ++i) {
        const std::size_t count = runs_[i].end - runs_[i].begin;
        // A chunk of checked state is one block of it.
        const bool fits = request_.sums != 0 ? i > 0 && runs_[i - 1].begin / kSumElements ==
                                                            runs_[i].begin / kSumElements
                                             : elements + count <= kChunkElements;
        const bool joins =
            !chunks_.empty() && chunks_.back().piece == runs_[i].piece && (whole_pieces || fits);
        if (joins) {
            chunks_.back().last = i + 1;
            elements += count;
        } else {
            chunks_.push_back({runs_[i].piece, i, i + 1});
            elements = count;
        }
    }
}

std::vector<std::size_t> UpdatePass::chunks_of_pieces() const {
    std::vector<std::size_t> counts(pieces_, 0);
    for (const UpdateChunk& chunk : chunks_) {
        ++counts[chunk.piece];
    }
    return counts;
}

bool UpdatePass::narrows_in_place() const noexcept {
    return part_.out != 0 && part_.out == part_.grad &&
           item_bytes(part_.out_dtype) < item_bytes(part_.grad_dtype);
}

const std::byte* UpdatePass::gradient_of(const UpdateRun& run) const noexcept {
    const std::size_t item = item_bytes(part_.grad_dtype);
    const Address address =
        request_.grads.empty()
            ? part_.grad + run.begin * item
            : request_.grads[run.segment] + (run.begin - part_.segments[run.segment].offset) * item;
    return reinterpret_cast<const std::byte*>(address);
}

std::byte* UpdatePass::out_of(const UpdateRun& run) const noexcept {
    const std::size_t out_item = item_bytes(part_.out_dtype);
    if (part_.out != part_.grad) {
        return reinterpret_cast<std::byte*>(part_.out + run.begin * out_item);
    }
    const std::size_t start = run.piece * request_.piece_elements;
    return reinterpret_cast<std::byte*>(part_.out + start * item_bytes(part_.grad_dtype) +
                                        (run.begin - start) * out_item);
}

void UpdatePass::run(const KernelTable& table, const UpdateChunk& chunk) const {
    if (request_.sums == 0) {
        const bool in_place = request_.source.master == 0;
        for (std::size_t i = chunk.first; i < chunk.last; ++i) {
            in_place ? run_one(table, runs_[i]) : run_from(table, runs_[i]);
        }
        return;
    }
    for (std::size_t i = chunk.first; i < chunk.last;) {
        const std::size_t block = runs_[i].begin / kSumElements;
        verify(table, block);
        for (; i < chunk.last && runs_[i].begin / kSumElements == block; ++i) {
            run_one(table, runs_[i]);
        }
        seal(table, block);
    }
}

// The state is copied by the stretch and updated where it is then: one pass over memory.
void UpdatePass::run_from(const KernelTable& table, const UpdateRun& run) const {
    for (std::size_t begin = run.begin; begin < run.end; begin += kFillElements) {
        UpdateRun stretch = run;
        stretch.begin = begin;
        stretch.end = std::min(run.end, begin + kFillElements);
        fill(stretch);
        run_one(table, stretch);
    }
}

void UpdatePass::fill(const UpdateRun& run) const {
    const auto take = [&run](Address to, Address from, std::size_t item) {
        std::memcpy(reinterpret_cast<void*>(to + run.begin * item),
                    reinterpret_cast<const void*>(from + run.begin * item),
                    (run.end - run.begin) * item);
    };
    const StateSource& source = request_.source;
    const bool split = part_.master_layout == MasterLayout::split;
    take(part_.master, source.master, split ? 2 : 4);
    if (split) {
        take(part_.low, source.low, 2);
    }
    take(part_.exp_avg, source.exp_avg, 4);
    take(part_.exp_avg_sq, source.exp_avg_sq, 4);
}

void UpdatePass::run_one(const KernelTable& table, const UpdateRun& run) const {
    if (part_.master_layout == MasterLayout::split) {
        run_split(table, run);
    } else {
        run_whole(table, run);
    }
}

std::uint32_t& UpdatePass::sum_at(std::size_t block, std::size_t role) const noexcept {
    return reinterpret_cast<std::uint32_t*>(request_.sums)[block * kSummedRoles + role];
}

std::uint32_t UpdatePass::sum_of(const KernelTable& table, std::size_t block,
                                 std::size_t role) const noexcept {
    const std::size_t begin = block * kSumElements;
    const std::size_t count = std::min(kSumElements, part_.elements - begin);
    const auto sum = [&](Address base, std::size_t item, std::uint32_t seed) {
        const auto* bytes = reinterpret_cast<const void*>(base + begin * item);
        return crc32c(table.level, bytes, count * item, seed);
    };
    if (role == 0 && part_.master_layout == MasterLayout::split) {
        return sum(part_.low, 2, sum(part_.master, 2, 0));
    }
    const Address bases[kSummedRoles] = {part_.master, part_.exp_avg, part_.exp_avg_sq};
    return sum(bases[role], 4, 0);
}

void UpdatePass::verify(const KernelTable& table, std::size_t block) const {
    for (std::size_t role = 0; role < kSummedRoles; ++role) {
        const std::uint32_t now = sum_of(table, block, role);
        const std::uint32_t then = sum_at(block, role);
        if (now != then) {
            const char* names[kSummedRoles] = {"master", "exp_avg", "exp_avg_sq"};
            throw std::runtime_error(
                different_text(std::string(names[role]) + " of " + names_in(block), now, then));
        }
    }
}

void UpdatePass::seal(const KernelTable& table, std::size_t block) const {
    for (std::size_t role = 0; role < kSummedRoles; ++role) {
        sum_at(block, role) = sum_of(table, block, role);
    }
}

std::string UpdatePass::names_in(std::size_t block) const {
    std::string text;
    std::size_t count = 0;
    for (const UpdateRun& run : runs_) {
        if (run.begin / kSumElements != block || request_.names.empty()) {
            continue;
        }
        const std::string& name = request_.names[run.segment];
        if (count < 3 && text.find(name) == std::string::npos) {
            text += (text.empty() ? "" : ", ") + name;
        }
        ++count;
    }
    return text.empty() ? "elements from " + std::to_string(block * kSumElements) + " on" : text;
}

void UpdatePass::run_whole(const KernelTable& table, const UpdateRun& run) const {
    alignas(64) float gradient[kTile];
    const Hyper& hyper =
        request_.hypers[static_cast<std::size_t>(request_.hyper_of_segment[run.segment])];
    auto* master = reinterpret_cast<float*>(part_.master) + run.begin;
    auto* average = reinterpret_cast<float*>(part_.exp_avg) + run.begin;
    auto* average_sq = reinterpret_cast<float*>(part_.exp_avg_sq) + run.begin;
    const std::byte* from = gradient_of(run);
    std::byte* to = part_.out != 0 ? out_of(run) : nullptr;
    const std::size_t grad_item = item_bytes(part_.grad_dtype);
    const std::size_t out_item = item_bytes(part_.out_dtype);
    const std::size_t total = run.end - run.begin;
    if (part_.grad_dtype == DType::float32 && to == nullptr) {
        table.adam(hyper, request_.scale, reinterpret_cast<const float*>(from), master, average,
                   average_sq, total);
        return;
    }
    for (std::size_t start = 0; start < total; start += kTile) {
        const std::size_t count = std::min(kTile, total - start);
        const float* tile = gradient;
        if (part_.grad_dtype == DType::float32) {
            tile = reinterpret_cast<const float*>(from + start * grad_item);
        } else {
            load_as_float(table, part_.grad_dtype, from + start * grad_item, gradient, count);
        }
        table.adam(hyper, request_.scale, tile, master + start, average + start, average_sq + start,
                   count);
        if (to != nullptr) {
            store_from_float(table, part_.out_dtype, master + start, to + start * out_item, count);
        }
    }
}

void UpdatePass::run_split(const KernelTable& table, const UpdateRun& run) const {
    alignas(64) float gradient[kTile];
    alignas(64) float weight[kTile];
    const Hyper& hyper =
        request_.hypers[static_cast<std::size_t>(request_.hyper_of_segment[run.segment])];
    auto* high = reinterpret_cast<std::uint16_t*>(part_.master) + run.begin;
    auto* low = reinterpret_cast<std::uint16_t*>(part_.low) + run.begin;
    auto* average = reinterpret_cast<float*>(part_.exp_avg) + run.begin;
    auto* average_sq = reinterpret_cast<float*>(part_.exp_avg_sq) + run.begin;
    const std::byte* from = gradient_of(run);
    const std::size_t grad_item = item_bytes(part_.grad_dtype);
    const std::size_t total = run.end - run.begin;
    if (part_.grad_dtype == DType::bfloat16 && table.adam_split != nullptr) {
        table.adam_split(hyper, request_.scale, reinterpret_cast<const std::uint16_t*>(from), high,
                         low, average, average_sq, total);
        return;
    }
    for (std::size_t start = 0; start < total; start += kTile) {
        const std::size_t count = std::min(kTile, total - start);
        load_as_float(table, part_.grad_dtype, from + start * grad_item, gradient, count);
        table.join(high + start, low + start, weight, count);
        table.adam(hyper, request_.scale, gradient, weight, average + start, average_sq + start,
                   count);
        table.split(weight, high + start, low + start, count);
    }
}

}  // namespace forebay
