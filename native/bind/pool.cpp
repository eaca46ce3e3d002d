#include <stdexcept>
#include <utility>

#include "bindings.h"

namespace forebay::bind {
namespace {

using SegmentTuple = std::tuple<std::size_t, std::size_t>;
using SpanTuple = std::tuple<Address, std::size_t>;
using FoldTuple = std::tuple<Address, Address, std::size_t>;
// (master, low, exp_avg, exp_avg_sq) that an update reads instead of what it writes; zeros: in
// place.
using StateTuple = std::tuple<Address, Address, Address, Address>;

MasterLayout parse_layout(const std::string& name) {
    if (name == "whole") {
        return MasterLayout::whole;
    }
    if (name == "split") {
        return MasterLayout::split;
    }
    throw std::invalid_argument("unknown master layout '" + name + "'\nhint: whole or split");
}

void make_part(PartState* self, Address grad, const std::string& grad_dtype,
               const std::string& master_layout, Address master, Address low, Address exp_avg,
               Address exp_avg_sq, Address out, const std::string& out_dtype,
               const std::vector<SegmentTuple>& segments, std::size_t elements) {
    PartState part{grad,
                   parse_dtype(grad_dtype),
                   parse_layout(master_layout),
                   master,
                   low,
                   exp_avg,
                   exp_avg_sq,
                   out,
                   parse_dtype(out_dtype),
                   {},
                   elements};
    part.segments.reserve(segments.size());
    for (const auto& [offset, count] : segments) {
        part.segments.push_back({offset, count});
    }
    new (self) PartState(std::move(part));
}

TicketHandle update(const PoolHandle& self, const PartState& part, std::vector<Hyper> hypers,
                    std::vector<int> hyper_of_segment, double scale, std::size_t piece_elements,
                    std::optional<std::vector<Address>> grads,
                    const std::vector<TicketHandle>& after, Address sums,
                    std::vector<std::string> names, const StateTuple& source) {
    const WithoutGil released;
    const auto& [master, low, exp_avg, exp_avg_sq] = source;
    UpdateRequest request{std::move(hypers),
                          std::move(hyper_of_segment),
                          static_cast<float>(scale),
                          piece_elements,
                          std::move(grads).value_or(std::vector<Address>{}),
                          sums,
                          std::move(names),
                          {master, low, exp_avg, exp_avg_sq}};
    return {self.it->update(part, std::move(request), tickets_of(after))};
}

TicketHandle fold(const PoolHandle& self, const std::vector<FoldTuple>& spans,
                  const std::string& src_dtype, bool first, const std::vector<TicketHandle>& after,
                  double scale) {
    const WithoutGil released;
    std::vector<FoldSpan> list;
    list.reserve(spans.size());
    for (const auto& [accumulator, source, elements] : spans) {
        list.push_back({accumulator, source, elements});
    }
    return {self.it->fold(std::move(list), parse_dtype(src_dtype), first, tickets_of(after),
                          static_cast<float>(scale))};
}

TicketHandle square_sums(const PoolHandle& self, const std::vector<SpanTuple>& spans,
                         const std::string& dtype, const std::vector<TicketHandle>& after) {
    const WithoutGil released;
    std::vector<ElementSpan> list;
    list.reserve(spans.size());
    for (const auto& [address, elements] : spans) {
        list.push_back({address, elements});
    }
    return {self.it->square_sums(std::move(list), parse_dtype(dtype), tickets_of(after))};
}

ChecksumAction parse_checksum_action(const std::string& name) {
    if (name == "store") {
        return ChecksumAction::store;
    }
    if (name == "compare") {
        return ChecksumAction::compare;
    }
    throw std::invalid_argument("unknown action '" + name + "'\nhint: store or compare");
}

TicketHandle checksums(const PoolHandle& self, const std::string& action, Address address,
                       std::size_t nbytes, std::size_t block_bytes, Address sums,
                       std::vector<std::string> names, const std::vector<TicketHandle>& after) {
    const WithoutGil released;
    ChecksumRequest request{
        parse_checksum_action(action), address, nbytes, block_bytes, sums, std::move(names)};
    return {self.it->checksums(std::move(request), tickets_of(after))};
}

}  // namespace

void bind_pool(nb::module_& module) {
    using namespace nb::literals;
    module.attr("SUM_ELEMENTS") = kSumElements;
    nb::class_<PartState>(module, "PartState")
        .def("__init__", &make_part, "grad"_a, "grad_dtype"_a, "master_layout"_a, "master"_a,
             "low"_a, "exp_avg"_a, "exp_avg_sq"_a, "out"_a, "out_dtype"_a, "segments"_a,
             "elements"_a)
        .def_ro("grad", &PartState::grad)
        .def_ro("master", &PartState::master)
        .def_ro("low", &PartState::low)
        .def_ro("exp_avg", &PartState::exp_avg)
        .def_ro("exp_avg_sq", &PartState::exp_avg_sq)
        .def_ro("out", &PartState::out)
        .def_ro("elements", &PartState::elements);
    nb::class_<PoolHandle>(module, "Pool")
        .def(
            "__init__",
            [](PoolHandle* self, std::size_t threads, const std::vector<int>& cpus) {
                auto pool = std::make_shared<Pool>(chosen_kernels(), threads, cpus);
                ProcessEnd::instance().add(pool);
                new (self) PoolHandle{std::move(pool)};
            },
            "threads"_a, "cpus"_a = std::vector<int>{})
        .def_prop_ro("threads", [](const PoolHandle& self) { return self.it->threads(); })
        .def_prop_ro("pinning_error",
                     [](const PoolHandle& self) { return self.it->pinning_error(); })
        .def_prop_ro("kernel_level",
                     [](const PoolHandle& self) { return std::string(self.it->table().level); })
        .def("update", &update, "part"_a, "hypers"_a, "hyper_of_segment"_a, "scale"_a,
             "piece_elements"_a, "grads"_a = nb::none(), "after"_a = std::vector<TicketHandle>{},
             "sums"_a = 0, "names"_a = std::vector<std::string>{}, "source"_a = StateTuple{})
        .def("fold", &fold, "spans"_a, "src_dtype"_a, "first"_a,
             "after"_a = std::vector<TicketHandle>{}, "scale"_a = 1.0)
        .def("square_sums", &square_sums, "spans"_a, "dtype"_a,
             "after"_a = std::vector<TicketHandle>{})
        .def("checksums", &checksums, "action"_a, "address"_a, "nbytes"_a, "block_bytes"_a,
             "sums"_a, "names"_a = std::vector<std::string>{},
             "after"_a = std::vector<TicketHandle>{})
        .def(
            "close", [](const PoolHandle& self) { self.it->close(); },
            nb::call_guard<WithoutGil>());
}

}  // namespace forebay::bind
