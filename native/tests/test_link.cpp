// Links under scripted delays: no order of events loses a byte, leaks a slot or hangs.
#include <atomic>
#include <chrono>
#include <numeric>
#include <stdexcept>
#include <thread>

#include "check.h"
#include "fixtures.h"
#include "forebay/link.h"

namespace forebay::test {
namespace {

using std::chrono_literals::operator""s;

void wait(const TicketPtr& ticket) { CHECK(ticket->wait_for(Ticket::Until::done, 60s)); }

CopyEnginePtr scripted(std::uint64_t seed, std::uint64_t delay_us, std::int64_t fail_at = -1) {
    return std::make_shared<ScriptedEngine>(std::make_shared<MemcpyEngine>(),
                                            Script{seed, delay_us, fail_at, "scripted"});
}

CopyPlan plan_of(std::vector<std::uint8_t>& target, const std::vector<std::uint8_t>& source,
                 std::size_t piece_bytes) {
    CopyPlan plan(piece_bytes);
    plan.append({address_of(target.data()), address_of(source.data()), source.size()});
    return plan;
}

std::vector<std::uint8_t> counted(std::size_t size) {
    std::vector<std::uint8_t> bytes(size);
    std::iota(bytes.begin(), bytes.end(), std::uint8_t{0});
    return bytes;
}

TEST(copies_arrive_whole) {
    for (const std::size_t size : {0, 1, 100, 4095, 4097, 50'000}) {
        const auto source = counted(size);
        for (const auto& engine :
             {CopyEnginePtr(std::make_shared<MemcpyEngine>()), scripted(1, 50)}) {
            std::vector<std::uint8_t> target(size);
            Link link(engine, {});
            const TicketPtr ticket = link.copy(plan_of(target, source, 1000), {});
            wait(ticket);
            CHECK(ticket->pieces_done() == (size + 999) / 1000);
            CHECK(target == source);
        }
    }
}

TEST(pieces_tell_when_they_were_copied) {
    const auto source = counted(5000);
    std::vector<std::uint8_t> target(5000);
    for (const auto& engine : {CopyEnginePtr(std::make_shared<MemcpyEngine>()), scripted(1, 200)}) {
        Link link(engine, {});
        const TicketPtr ticket = link.copy(plan_of(target, source, 1000), {});
        wait(ticket);
        const std::vector<PieceTimes> times = ticket->times();
        CHECK(times.size() == 5);
        for (std::size_t piece = 0; piece < times.size(); ++piece) {
            CHECK(times[piece].begin > 0 && times[piece].begin <= times[piece].end);
            CHECK(piece == 0 || times[piece - 1].begin <= times[piece].begin);
        }
    }
    CHECK(Ticket(3).times()[2].end == 0);
}

TEST(pieces_follow_pieces) {
    const auto source = counted(20'000);
    std::vector<std::uint8_t> middle(20'000);
    std::vector<std::uint8_t> target(20'000);
    Link first(scripted(2, 100), {});
    Link second(scripted(3, 100), {{0}, 3, 4, "second"});
    for (int round = 0; round < 5; ++round) {
        std::fill(middle.begin(), middle.end(), std::uint8_t{0});
        std::fill(target.begin(), target.end(), std::uint8_t{0});
        LinkOrder order;
        order.piecewise = first.copy(plan_of(middle, source, 700), {});
        wait(second.copy(plan_of(target, middle, 700), order));
        CHECK(target == source);
    }
}

TEST(a_copy_is_not_forgotten_when_its_predecessor_goes_on_meanwhile) {
    const auto source = counted(4);
    std::vector<std::uint8_t> target(4);
    Link link(std::make_shared<MemcpyEngine>(), {});
    const CopyPlan plan = plan_of(target, source, 1);
    for (int round = 0; round < 2000; ++round) {
        LinkOrder order;
        order.piecewise = std::make_shared<Ticket>(4);
        // Never ends: every single piece has to wake the lane.
        std::thread walker([&order] {
            for (std::size_t piece = 0; piece < 4; ++piece) {
                order.piecewise->mark_done(piece);
            }
        });
        wait(link.copy(plan, order));
        walker.join();
    }
}

// Notes what a device would be asked; every piece is there at once, but its fence is a device's.
class NotingEngine final : public CopyEngine {
public:
    struct Notes {
        std::vector<Stream> submitted;
        std::vector<std::pair<Stream, Event>> held;
        std::vector<Stream> fences_held;  // by the stream of the piece
    };

    std::shared_ptr<Fence> submit(Stream stream, const std::vector<CopySpan>& spans) override {
        notes_->submitted.push_back(stream);
        copier_.submit(stream, spans);
        return std::make_shared<NotedFence>(notes_, stream);
    }
    void hold_stream(Stream stream, Event event) override {
        notes_->held.push_back({stream, event});
    }
    bool reached(Event) override { return true; }
    void register_host(Address, std::size_t) override {}
    void unregister_host(Address) override {}
    Notes& notes() { return *notes_; }

private:
    class NotedFence final : public Fence {
    public:
        NotedFence(std::shared_ptr<Notes> notes, Stream stream)
            : notes_(std::move(notes)), stream_(stream) {}
        void wait() override {}
        bool hold(Stream) override {
            notes_->fences_held.push_back(stream_);
            return true;
        }

    private:
        std::shared_ptr<Notes> notes_;
        Stream stream_;
    };

    MemcpyEngine copier_;
    std::shared_ptr<Notes> notes_ = std::make_shared<Notes>();
};

TEST(streams_take_turns_and_each_waits_for_the_event) {
    const auto source = counted(5000);
    std::vector<std::uint8_t> target(5000);
    const auto engine = std::make_shared<NotingEngine>();
    Link link(engine, {{7, 8}});
    LinkOrder order;
    order.event = 3;
    wait(link.copy(plan_of(target, source, 1000), order));
    wait(link.copy(plan_of(target, source, 5000), {}));
    link.close();
    CHECK(engine->notes().submitted == std::vector<Stream>({7, 8, 7, 8, 7, 8}));
    CHECK(engine->notes().held == (std::vector<std::pair<Stream, Event>>{{7, 3}, {8, 3}}));
    CHECK(target == source);
}

TEST(a_stream_held_for_a_ticket_waits_for_the_end_of_every_queue) {
    const auto notes = std::make_shared<NotingEngine>();
    const auto fence = [&](Stream stream) { return notes->submit(stream, {}); };
    Ticket ticket(3);
    ticket.mark_issued(fence(7), 0);
    ticket.mark_issued(fence(8), 1);
    ticket.mark_issued(fence(9), 0);
    CHECK(ticket.hold_stream(1));
    CHECK(notes->notes().fences_held == std::vector<Stream>({9, 8}));
    Ticket mixed(2);
    mixed.mark_issued(fence(7), 0);
    mixed.mark_issued(nullptr, 1);
    CHECK(!mixed.hold_stream(1));
}

// Reaches the events that it is told to, and counts who asks.
class AskedEngine final : public CopyEngine {
public:
    std::shared_ptr<Fence> submit(Stream stream, const std::vector<CopySpan>& spans) override {
        return copier_.submit(stream, spans);
    }
    void hold_stream(Stream, Event) override {}
    bool reached(Event event) override {
        ++questions;
        return event <= newest_reached;
    }
    void register_host(Address, std::size_t) override {}
    void unregister_host(Address) override {}

    std::atomic<int> questions{0};
    std::atomic<Event> newest_reached{0};

private:
    MemcpyEngine copier_;
};

LinkOptions awaiting() {
    LinkOptions options;
    options.awaits_events = true;
    return options;
}

TEST(a_lane_seldom_asks_for_events) {
    const auto source = counted(100);
    std::vector<std::uint8_t> target(100);
    const auto engine = std::make_shared<AskedEngine>();
    Link link(engine, awaiting());
    const auto begin = std::chrono::steady_clock::now();
    std::vector<TicketPtr> tickets;
    for (Event event = 1; event <= 30; ++event) {
        LinkOrder order;
        order.event = event;
        tickets.push_back(link.copy(plan_of(target, source, 100), order));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const int asked = engine->questions;
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
    CHECK(asked >= 1 && asked <= took.count() * 4 + 1);  // every 250 microseconds
    engine->newest_reached = 30;
    for (const TicketPtr& ticket : tickets) {
        wait(ticket);
    }
    CHECK(target == source);
}

TEST(no_copy_waits_for_events_of_older_ones) {
    const auto source = counted(100);
    std::vector<std::uint8_t> target(100);
    const auto engine = std::make_shared<AskedEngine>();
    engine->newest_reached = 1;
    Link link(engine, awaiting());
    LinkOrder late;
    for (Event event = 100; event > 90; --event) {
        late.event = event;
        late.priority = 0;
        static_cast<void>(link.copy(plan_of(target, source, 100), late));
    }
    LinkOrder ready;
    ready.event = 1;
    ready.priority = 1;
    wait(link.copy(plan_of(target, source, 100), ready));
    CHECK(target == source);
}

TEST(a_link_without_a_stream_is_refused) {
    LinkOptions options;
    options.streams.clear();
    bool refused = false;
    try {
        Link link(std::make_shared<MemcpyEngine>(), options);
    } catch (const std::invalid_argument&) {
        refused = true;
    }
    CHECK(refused);
}

TEST(sums_share_a_ring) {
    auto pool = Pool(kernel_table(""), 2, {});
    std::vector<float> memory(2 * 256);
    auto ring = std::make_shared<StagingRing>(address_of(memory.data()), 1024, 2);
    std::vector<std::vector<float>> sums(3, std::vector<float>(5000));
    const std::vector<float> ones(5000, 1.0F);
    std::vector<std::unique_ptr<Link>> links;
    std::vector<TicketPtr> tickets;
    for (std::size_t i = 0; i < sums.size(); ++i) {
        links.push_back(std::make_unique<Link>(scripted(i, 50), LinkOptions{}));
        TicketPtr last;
        for (int addend = 0; addend < 4; ++addend) {
            FoldRequest request;
            request.spans = {{address_of(sums[i].data()), address_of(ones.data()), 5000}};
            request.first = addend == 0;
            request.pool = pool.queue();
            request.ring = ring;
            LinkOrder order;
            if (last) {
                order.after.push_back(last);
            }
            last = links[i]->copy_fold(request, order);
        }
        tickets.push_back(last);
    }
    for (const TicketPtr& ticket : tickets) {
        wait(ticket);
    }
    for (const auto& sum : sums) {
        CHECK(sum == std::vector<float>(5000, 4.0F));
    }
    CHECK(ring->slots_free() == 2);
}

TEST(failures_drain_before_they_surface) {
    const auto source = counted(10'000);
    for (std::int64_t fail_at = 0; fail_at < 10; fail_at += 3) {
        std::vector<std::uint8_t> target(10'000);
        Link link(scripted(5, 200, fail_at), {});
        const TicketPtr ticket = link.copy(plan_of(target, source, 1000), {});
        bool failed = false;
        try {
            wait(ticket);
        } catch (const std::runtime_error&) {
            failed = true;
            target.assign(10'000, 7);  // nothing may still be writing here
        }
        CHECK(failed);
        wait(link.copy(plan_of(target, source, 1000), {}));
        CHECK(target == source);
    }
}

TEST(closing_in_the_middle_never_hangs) {
    const auto source = counted(100'000);
    std::vector<std::uint8_t> target(100'000);
    std::vector<float> memory(256);
    std::vector<float> sum(1000);
    auto ring = std::make_shared<StagingRing>(address_of(memory.data()), 512, 2);
    for (int round = 0; round < 10; ++round) {
        auto pool = std::make_unique<Pool>(kernel_table(""), 2, std::vector<int>{});
        auto link = std::make_unique<Link>(scripted(6, 100), LinkOptions{});
        const TicketPtr copy = link->copy(plan_of(target, source, 100), {});
        FoldRequest request;
        request.spans = {{address_of(sum.data()), address_of(sum.data()), 1000}};
        request.pool = pool->queue();
        request.ring = ring;
        const TicketPtr fold = link->copy_fold(request, {});
        std::this_thread::sleep_for(std::chrono::microseconds(300 * round));
        if (round % 2 == 0) {
            pool.reset();
        }
        link.reset();
        pool.reset();
        CHECK(copy->ended());
        CHECK(fold->ended());
        CHECK(ring->slots_free() == 2);
    }
}

}  // namespace
}  // namespace forebay::test
