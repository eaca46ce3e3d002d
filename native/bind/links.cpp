#include <utility>

#include "bindings.h"

namespace forebay::bind {
namespace {

using FoldTuple = std::tuple<Address, Address, std::size_t>;

TicketHandle copy(const LinkHandle& self, const CopyPlan& plan, int priority,
                  const std::vector<TicketHandle>& after,
                  const std::optional<TicketHandle>& piecewise, Event event) {
    const WithoutGil released;
    LinkOrder order{priority, tickets_of(after), piecewise ? piecewise->it : nullptr, event};
    return {self.it->copy(plan, std::move(order))};
}

TicketHandle copy_fold(const LinkHandle& self, const PoolHandle& pool,
                       const std::vector<FoldTuple>& spans, const std::string& src_dtype,
                       bool first, const RingHandle& ring, int priority,
                       const std::vector<TicketHandle>& after, Event event) {
    const WithoutGil released;
    FoldRequest request{{}, parse_dtype(src_dtype), first, pool.it->queue(), ring.it};
    request.spans.reserve(spans.size());
    for (const auto& [accumulator, source, elements] : spans) {
        request.spans.push_back({accumulator, source, elements});
    }
    LinkOrder order{priority, tickets_of(after), nullptr, event};
    return {self.it->copy_fold(std::move(request), std::move(order))};
}

}  // namespace

void bind_links(nb::module_& module) {
    using namespace nb::literals;
    nb::class_<CopyPlan>(module, "CopyPlan")
        .def(nb::init<std::size_t>(), "piece_bytes"_a)
        .def(
            "append",
            [](CopyPlan& self, Address dst, Address src, std::size_t nbytes) {
                self.append({dst, src, nbytes});
            },
            "dst"_a, "src"_a, "nbytes"_a)
        .def(
            "add",
            [](CopyPlan& self, std::size_t piece_index, Address dst, Address src,
               std::size_t nbytes) { self.add(piece_index, {dst, src, nbytes}); },
            "piece_index"_a, "dst"_a, "src"_a, "nbytes"_a)
        .def_prop_ro("pieces", &CopyPlan::pieces)
        .def_prop_ro("nbytes", &CopyPlan::bytes);
    nb::class_<RingHandle>(module, "StagingRing")
        .def(
            "__init__",
            [](RingHandle* self, Address addr, std::size_t slot_bytes, std::size_t slots) {
                new (self) RingHandle{std::make_shared<StagingRing>(addr, slot_bytes, slots)};
            },
            "addr"_a, "slot_bytes"_a, "slots"_a)
        .def_prop_ro("slot_bytes", [](const RingHandle& self) { return self.it->slot_bytes(); })
        .def_prop_ro("slots", [](const RingHandle& self) { return self.it->slots(); })
        .def_prop_ro("slots_free", [](const RingHandle& self) { return self.it->slots_free(); });
    nb::class_<LinkHandle>(module, "Link")
        .def(
            "__init__",
            [](LinkHandle* self, const EngineHandle& engine, std::vector<Stream> streams,
               std::size_t max_in_flight, std::int64_t shuffle_seed, std::string name,
               bool awaits_events) {
                LinkOptions options{std::move(streams), max_in_flight, shuffle_seed,
                                    std::move(name), awaits_events};
                auto link = std::make_shared<Link>(engine.it, std::move(options));
                ProcessEnd::instance().add(link);
                new (self) LinkHandle{std::move(link)};
            },
            "engine"_a, "streams"_a = std::vector<Stream>{0}, "max_in_flight"_a = 2,
            "shuffle_seed"_a = -1, "name"_a = "link", "awaits_events"_a = false)
        .def("copy", &copy, "plan"_a, "priority"_a = 0, "after"_a = std::vector<TicketHandle>{},
             "piecewise"_a = nb::none(), "event"_a = 0)
        .def("copy_fold", &copy_fold, "pool"_a, "spans"_a, "src_dtype"_a, "first"_a, "ring"_a,
             "priority"_a = 0, "after"_a = std::vector<TicketHandle>{}, "event"_a = 0)
        .def(
            "close", [](const LinkHandle& self) { self.it->close(); },
            nb::call_guard<WithoutGil>());
}

}  // namespace forebay::bind
