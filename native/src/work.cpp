#include "work.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "forebay/crc32c.h"

namespace forebay {
namespace {

constexpr std::size_t kChunkElements = std::size_t{64} * 1024;  // as in update.cpp
constexpr std::size_t kFoldTile = 256;

std::vector<SpanChunk> cut(const std::vector<std::size_t>& lengths, std::size_t most) {
    std::vector<SpanChunk> chunks;
    for (std::size_t span = 0; span < lengths.size(); ++span) {
        for (std::size_t begin = 0; begin < lengths[span]; begin += most) {
            chunks.push_back({span, begin, std::min(begin + most, lengths[span])});
        }
    }
    return chunks;
}

void check_span(std::size_t index, Address address, std::size_t item) {
    if (address == 0 || address % item != 0) {
        throw std::invalid_argument(
            "span " + std::to_string(index) + " has address " + std::to_string(address) +
            ", which must be non-zero and a multiple of " + std::to_string(item) + " bytes");
    }
}

void multiply(float* values, float scale, std::size_t count) {
    if (scale == 1.0F) {
        return;  // exact, and most sums have none
    }
    for (std::size_t i = 0; i < count; ++i) {
        values[i] *= scale;
    }
}

}  // namespace

UpdateWork::UpdateWork(const KernelTable& table, UpdatePass pass)
    : table_(table),
      pass_(std::move(pass)),
      left_in_piece_(std::make_unique<std::atomic<std::size_t>[]>(pass_.pieces())) {
    const std::vector<std::size_t> counts = pass_.chunks_of_pieces();
    for (std::size_t piece = 0; piece < counts.size(); ++piece) {
        left_in_piece_[piece].store(counts[piece], std::memory_order_relaxed);
    }
}

void UpdateWork::begin(Ticket& ticket) {
    for (std::size_t piece = 0; piece < pass_.pieces(); ++piece) {
        if (left_in_piece_[piece].load(std::memory_order_relaxed) == 0) {
            ticket.mark_issued();
            ticket.mark_done(piece);
        }
    }
}

void UpdateWork::run(std::size_t chunk, Ticket& ticket) {
    const UpdateChunk& range = pass_.chunks()[chunk];
    pass_.run(table_, range);
    if (left_in_piece_[range.piece].fetch_sub(1, std::memory_order_acq_rel) == 1) {
        ticket.mark_issued();
        ticket.mark_done(range.piece);
    }
}

FoldWork::FoldWork(const KernelTable& table, std::vector<FoldSpan> spans, DType dtype, bool first,
                   float scale)
    : table_(table), spans_(std::move(spans)), dtype_(dtype), first_(first), scale_(scale) {
    std::vector<std::size_t> lengths;
    for (const FoldSpan& span : spans_) {
        if (span.elements > 0) {
            check_span(lengths.size(), span.accumulator, sizeof(float));
            check_span(lengths.size(), span.source, item_bytes(dtype));
        }
        lengths.push_back(span.elements);
    }
    chunks_ = cut(lengths, kChunkElements);
}

void FoldWork::run(std::size_t chunk, Ticket& ticket) {
    static_cast<void>(ticket);
    const SpanChunk& range = chunks_[chunk];
    const FoldSpan& span = spans_[range.span];
    auto* accumulator = reinterpret_cast<float*>(span.accumulator);
    const auto* source = reinterpret_cast<const std::byte*>(span.source);
    const std::size_t item = item_bytes(dtype_);
    alignas(64) float tile[kFoldTile];
    for (std::size_t start = range.begin; start < range.end; start += kFoldTile) {
        const std::size_t count = std::min(kFoldTile, range.end - start);
        const std::byte* from = source + start * item;
        if (first_) {
            load_as_float(table_, dtype_, from, accumulator + start, count);
            multiply(accumulator + start, scale_, count);
        } else if (dtype_ == DType::float32 && scale_ == 1.0F) {
            table_.add(reinterpret_cast<const float*>(from), accumulator + start, count);
        } else {
            load_as_float(table_, dtype_, from, tile, count);
            multiply(tile, scale_, count);
            table_.add(tile, accumulator + start, count);
        }
    }
}

SquareWork::SquareWork(const KernelTable& table, std::vector<ElementSpan> spans, DType dtype)
    : table_(table), spans_(std::move(spans)), dtype_(dtype) {
    std::vector<std::size_t> lengths;
    for (const ElementSpan& span : spans_) {
        if (span.elements > 0) {
            check_span(lengths.size(), span.address, item_bytes(dtype));
        }
        lengths.push_back(tree_blocks(span.elements));
        block_sums_.emplace_back(lengths.back());
    }
    chunks_ = cut(lengths, kChunkElements / kTreeBlock);
}

void SquareWork::run(std::size_t chunk, Ticket& ticket) {
    static_cast<void>(ticket);
    const SpanChunk& range = chunks_[chunk];
    square_blocks(table_, dtype_, spans_[range.span], range.begin, range.end,
                  block_sums_[range.span].data() + range.begin);
}

void SquareWork::end(Ticket& ticket) {
    std::vector<double> sums;
    sums.reserve(spans_.size());
    for (std::vector<double>& blocks : block_sums_) {
        sums.push_back(sum_tree(table_, std::move(blocks)));
    }
    ticket.finish(std::move(sums));
}

ChecksumWork::ChecksumWork(const KernelTable& table, ChecksumRequest request)
    : table_(table), request_(std::move(request)), blocks_(0) {
    if (request_.block_bytes == 0) {
        throw std::invalid_argument("a checksum's block needs at least 1 byte, not 0");
    }
    blocks_ = (request_.bytes + request_.block_bytes - 1) / request_.block_bytes;
    if (blocks_ == 0) {
        return;
    }
    check_span(0, request_.address, 1);
    check_span(0, request_.sums, sizeof(std::uint32_t));
    if (!request_.names.empty() && request_.names.size() != blocks_) {
        throw std::invalid_argument("names has " + std::to_string(request_.names.size()) +
                                    " entries for " + std::to_string(blocks_) + " blocks");
    }
}

void ChecksumWork::run(std::size_t chunk, Ticket& ticket) {
    static_cast<void>(ticket);
    const std::size_t begin = chunk * request_.block_bytes;
    const std::size_t count = std::min(request_.block_bytes, request_.bytes - begin);
    const auto* bytes = reinterpret_cast<const std::byte*>(request_.address) + begin;
    const std::uint32_t now = crc32c(table_.level, bytes, count, 0);
    std::uint32_t& then = reinterpret_cast<std::uint32_t*>(request_.sums)[chunk];
    if (request_.action == ChecksumAction::store) {
        then = now;
        return;
    }
    if (now == then) {
        return;
    }
    const std::string what = request_.names.empty() ? "a block" : request_.names[chunk];
    throw std::runtime_error(different_text(what, now, then));
}

}  // namespace forebay
