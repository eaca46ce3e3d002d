#include "bindings.h"

namespace forebay::bind {
namespace {

bool wait(const TicketHandle& ticket, Ticket::Until until, double timeout_s) {
    return wait_interruptibly(timeout_s, [&](std::chrono::nanoseconds slice) {
        return ticket.it->wait_for(until, slice);
    });
}

// Where the device can wait, it does; else the host does, for a cpu stream is the thread itself.
void stream_wait(const TicketHandle& ticket, Stream stream) {
    wait(ticket, Ticket::Until::issued, -1);
    bool held = false;
    {
        const WithoutGil released;
        held = ticket.it->hold_stream(stream);
    }
    if (!held) {
        wait(ticket, Ticket::Until::done, -1);
    }
}

}  // namespace

void bind_tickets(nb::module_& module) {
    using namespace nb::literals;
    nb::class_<TicketHandle>(module, "Ticket")
        .def_static("completed", [] { return TicketHandle{Ticket::completed()}; })
        .def_prop_ro("pieces", [](const TicketHandle& self) { return self.it->pieces(); })
        .def_prop_ro("pieces_done", [](const TicketHandle& self) { return self.it->pieces_done(); })
        .def_prop_ro("pieces_issued",
                     [](const TicketHandle& self) { return self.it->pieces_issued(); })
        .def_prop_ro("done", [](const TicketHandle& self) { return self.it->done(); })
        .def_prop_ro("failed", [](const TicketHandle& self) { return self.it->failed(); })
        .def(
            "wait",
            [](const TicketHandle& self, double timeout_s) {
                return wait(self, Ticket::Until::done, timeout_s);
            },
            "timeout_s"_a = -1.0)
        .def(
            "wait_issued",
            [](const TicketHandle& self, double timeout_s) {
                return wait(self, Ticket::Until::issued, timeout_s);
            },
            "timeout_s"_a = -1.0)
        .def("stream_wait", &stream_wait, "stream"_a)
        .def("times",
             [](const TicketHandle& self) {
                 std::vector<std::tuple<std::int64_t, std::int64_t>> times;
                 for (const PieceTimes& piece : self.it->times()) {
                     times.emplace_back(piece.begin, piece.end);
                 }
                 return times;
             })
        .def("results", [](const TicketHandle& self) {
            wait(self, Ticket::Until::done, -1);
            return self.it->results();
        });
}

}  // namespace forebay::bind
