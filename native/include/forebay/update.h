// One fused pass of Adam over a part: which elements belong to which piece and chunk, and the
// pass over one chunk. No threads here; see pool.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "forebay/kernels.h"
#include "forebay/types.h"

namespace forebay {

// Elements that one checksum of a role of state covers: the 768 KiB of all three are still in a
// core's cache when the update has passed over them. Also the size of an update's chunk.
constexpr std::size_t kSumElements = std::size_t{64} * 1024;
constexpr std::size_t kSummedRoles = 3;  // master (high, then low), first and second moment

// Everything of one update that the caller chooses beside the part itself.
struct UpdateRequest {
    std::vector<Hyper> hypers;
    // Per segment of the part: index into hypers, or -1 (absent: not a bit of it changes).
    std::vector<int> hyper_of_segment;
    float scale = 1.0F;
    std::size_t piece_elements = 0;
    // Address of each segment's own gradient (its first element); empty: the part's.
    std::vector<Address> grads;
    // kSummedRoles uint32 for every kSumElements of the part, the CRC-32C of what each role holds
    // there; 0: none. A block is compared before a bit of it changes, a difference fails the
    // update, and the sums of its new bytes take the old ones' place.
    Address sums = 0;
    std::vector<std::string> names;  // of the segments, for that failure's text; may be empty
    // The part's state is written, not read: present segments come from here, in the same layout.
    StateSource source;
};

// Consecutive elements of one segment inside one piece.
struct UpdateRun {
    std::size_t segment = 0;
    std::size_t piece = 0;
    std::size_t begin = 0;  // element offsets of the part
    std::size_t end = 0;
};

// Runs [first, last) that one thread does in ascending order.
struct UpdateChunk {
    std::size_t piece = 0;
    std::size_t first = 0;
    std::size_t last = 0;
};

// A checked request, cut into chunks. Throws std::invalid_argument on bad input, before any bit
// changes. [Note: narrowing in place] When the new weight is written over its gradient
// (out == grad), element e of the piece that starts at s goes to grad + s * grad_item +
// (e - s) * out_item. A narrower weight then lands below gradients still to be read only if the
// piece is done in ascending order, so such a piece is one chunk.
class UpdatePass {
public:
    UpdatePass(const PartState& part, UpdateRequest request);

    std::size_t pieces() const noexcept { return pieces_; }
    const std::vector<UpdateChunk>& chunks() const noexcept { return chunks_; }
    // Chunks of each piece; 0 for a piece without a present element.
    std::vector<std::size_t> chunks_of_pieces() const;
    void run(const KernelTable& table, const UpdateChunk& chunk) const;

private:
    void cut_into_runs();
    void cut_into_chunks();
    void run_one(const KernelTable& table, const UpdateRun& run) const;
    void run_from(const KernelTable& table, const UpdateRun& run) const;
    void fill(const UpdateRun& run) const;
    void run_whole(const KernelTable& table, const UpdateRun& run) const;
    void run_split(const KernelTable& table, const UpdateRun& run) const;
    const std::byte* gradient_of(const UpdateRun& run) const noexcept;
    std::byte* out_of(const UpdateRun& run) const noexcept;
    bool narrows_in_place() const noexcept;
    std::uint32_t sum_of(const KernelTable& table, std::size_t block,
                         std::size_t role) const noexcept;
    std::uint32_t& sum_at(std::size_t block, std::size_t role) const noexcept;
    void verify(const KernelTable& table, std::size_t block) const;
    void seal(const KernelTable& table, std::size_t block) const;
    std::string names_in(std::size_t block) const;

    PartState part_;
    UpdateRequest request_;
    std::size_t pieces_ = 0;
    std::vector<UpdateRun> runs_;
    std::vector<UpdateChunk> chunks_;
};

}  // namespace forebay
