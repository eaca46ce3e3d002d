// The pool: any number of threads gives the bits of one; closing, failing and outliving.
#include <algorithm>
#include <stdexcept>
#include <thread>

#include "check.h"
#include "fixtures.h"
#include "forebay/crc32c.h"
#include "forebay/pool.h"

namespace forebay::test {
namespace {

using std::chrono_literals::operator""s;

const KernelTable& best() { return kernel_table(""); }

void wait(const TicketPtr& ticket) { CHECK(ticket->wait_for(Ticket::Until::done, 60s)); }

bool fails(const TicketPtr& ticket, const std::string& text) {
    try {
        wait(ticket);
    } catch (const std::runtime_error& error) {
        return std::string(error.what()).find(text) != std::string::npos;
    }
    return false;
}

TEST(thread_count_changes_no_bit) {
    TestPart wanted(300'001);
    UpdatePass pass(wanted.state(), TestPart::request(1000));
    for (const UpdateChunk& chunk : pass.chunks()) {
        pass.run(best(), chunk);
    }
    for (const std::size_t threads : {1, 2, 5}) {
        Pool pool(best(), threads, {});
        TestPart part(300'001);
        wait(pool.update(part.state(), TestPart::request(70'000), {}));
        CHECK(same(part.master, wanted.master));
        CHECK(same(part.exp_avg, wanted.exp_avg));
        CHECK(same(part.exp_avg_sq, wanted.exp_avg_sq));
    }
}

TEST(pieces_tell_when_they_were_updated) {
    Pool pool(best(), 2, {});
    TestPart part(200'000);
    const TicketPtr first = pool.update(part.state(), TestPart::request(90'000), {});
    const TicketPtr second = pool.update(part.state(), TestPart::request(90'000), {first});
    wait(second);
    std::int64_t last = 0;
    for (const PieceTimes& piece : first->times()) {
        CHECK(piece.begin > 0 && piece.begin <= piece.end);
        last = std::max(last, piece.end);
    }
    for (const PieceTimes& piece : second->times()) {
        CHECK(piece.begin >= last && piece.begin <= piece.end);
    }
    const TicketPtr sums =
        pool.square_sums({{address_of(part.grad.data()), 200'000}}, DType::float32, {});
    wait(sums);
    CHECK(sums->times().size() == 1 && sums->times()[0].begin < sums->times()[0].end);
}

TEST(narrowing_over_the_gradient_equals_narrowing_apart) {
    for (const std::size_t piece : {1, 100, 777, 100'000}) {
        TestPart apart(5000);
        std::vector<std::uint16_t> weights(5000);
        PartState state = apart.state();
        state.out = address_of(weights.data());
        state.out_dtype = DType::bfloat16;
        TestPart over(5000);
        PartState state_over = over.state();
        state_over.out = state_over.grad;
        state_over.out_dtype = DType::bfloat16;
        Pool pool(best(), 3, {});
        wait(pool.update(state, TestPart::request(piece), {}));
        wait(pool.update(state_over, TestPart::request(piece), {}));
        for (std::size_t start = 0; start < 5000; start += piece) {
            const std::size_t count = std::min(piece, 5000 - start);
            CHECK(std::memcmp(over.grad.data() + start, weights.data() + start, count * 2) == 0);
        }
    }
}

TEST(dependents_run_after_their_predecessors) {
    Pool pool(best(), 3, {});
    std::vector<float> sum(100'000);
    std::vector<float> ones(100'000, 1.0F);
    const std::vector<FoldSpan> spans = {
        {address_of(sum.data()), address_of(ones.data()), 100'000}};
    TicketPtr last = pool.fold(spans, DType::float32, true, {});
    for (int i = 1; i < 100; ++i) {
        last = pool.fold(spans, DType::float32, false, {last});
    }
    const TicketPtr squares =
        pool.square_sums({{address_of(sum.data()), sum.size()}}, DType::float32, {last});
    wait(squares);
    CHECK(squares->results() == std::vector<double>{1e9});
}

TEST(many_threads_may_submit) {
    Pool pool(best(), 2, {});
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 4; ++caller) {
        callers.emplace_back([&pool] {
            std::vector<float> sum(3000);
            std::vector<float> ones(3000, 1.0F);
            TicketPtr last;
            for (int i = 0; i < 50; ++i) {
                std::vector<TicketPtr> after;
                if (last) {
                    after.push_back(last);
                }
                last = pool.fold({{address_of(sum.data()), address_of(ones.data()), 3000}},
                                 DType::float32, i == 0, after);
            }
            wait(last);
            CHECK(sum == std::vector<float>(3000, 50.0F));
        });
    }
    for (std::thread& caller : callers) {
        caller.join();
    }
}

TEST(closing_fails_what_is_left_and_tickets_outlive_the_pool) {
    std::vector<float> sum(1'000'000);
    const std::vector<FoldSpan> spans = {{address_of(sum.data()), address_of(sum.data()), 1000}};
    auto gate = std::make_shared<Ticket>(1);
    TicketPtr waiting;
    TicketPtr dependent;
    {
        Pool pool(best(), 2, {});
        waiting = pool.fold(spans, DType::float32, true, {gate});
        dependent = pool.fold(spans, DType::float32, true, {waiting});
        for (int i = 0; i < 10; ++i) {
            pool.square_sums({{address_of(sum.data()), sum.size()}}, DType::float32, {});
        }
    }
    CHECK(fails(waiting, "closed"));
    CHECK(fails(dependent, "closed"));
    gate->finish();  // wakes nobody
}

TEST(failures_poison_dependents) {
    Pool pool(best(), 2, {});
    auto gate = std::make_shared<Ticket>(1);
    TestPart part(100);
    const std::vector<float> before = part.master;
    const TicketPtr update = pool.update(part.state(), TestPart::request(10), {gate});
    const TicketPtr sums = pool.square_sums({}, DType::float32, {update});
    CHECK(!update->wait_for(Ticket::Until::done, std::chrono::milliseconds(5)));
    gate->fail("no power");
    CHECK(fails(update, "no power"));
    CHECK(fails(sums, "no power"));
    CHECK(same(part.master, before));
}

TEST(work_is_not_forgotten_when_its_predecessor_ends_meanwhile) {
    Pool pool(best(), 2, {});
    for (int round = 0; round < 2000; ++round) {
        auto gate = std::make_shared<Ticket>(1);
        std::thread ender([&gate] { gate->finish(); });
        wait(pool.square_sums({}, DType::float32, {gate}));
        ender.join();
    }
}

TEST(an_empty_part_waits_for_its_predecessors) {
    Pool pool(best(), 1, {});
    auto gate = std::make_shared<Ticket>(1);
    PartState part;
    part.segments = {};
    UpdateRequest request;
    request.piece_elements = 5;
    const TicketPtr ticket = pool.update(part, request, {gate});
    CHECK(!ticket->wait_for(Ticket::Until::done, std::chrono::milliseconds(5)));
    gate->finish();
    wait(ticket);
}

std::vector<std::uint32_t> sums_of(const TestPart& part) {
    std::vector<std::uint32_t> sums;
    for (std::size_t begin = 0; begin < part.master.size(); begin += kSumElements) {
        const std::size_t count = std::min(kSumElements, part.master.size() - begin);
        for (const auto* role : {&part.master, &part.exp_avg, &part.exp_avg_sq}) {
            sums.push_back(crc32c("baseline", role->data() + begin, count * sizeof(float), 0));
        }
    }
    return sums;
}

TEST(checked_updates_compare_and_sum) {
    const std::size_t elements = 5 * kSumElements + 77;
    for (const KernelTable* table : all_levels()) {
        for (const std::size_t piece : {2 * kSumElements, 2 * elements}) {
            TestPart plain(elements);
            TestPart checked(elements);
            std::vector<std::uint32_t> sums = sums_of(checked);
            UpdateRequest request = TestPart::request(piece);
            request.sums = address_of(sums.data());
            Pool pool(*table, 3, {});
            wait(pool.update(plain.state(), TestPart::request(piece), {}));
            wait(pool.update(checked.state(), request, {}));
            CHECK(same(plain.master, checked.master));
            CHECK(sums == sums_of(checked));
        }
    }
}

TEST(checked_updates_stop_at_a_flipped_bit) {
    const std::size_t elements = 3 * kSumElements;
    TestPart part(elements);
    std::vector<std::uint32_t> sums = sums_of(part);
    auto* bytes = reinterpret_cast<unsigned char*>(part.exp_avg.data() + 2 * kSumElements + 5);
    *bytes ^= 0x10;
    const std::vector<float> before = part.master;
    UpdateRequest request = TestPart::request(elements);
    request.sums = address_of(sums.data());
    PartState state = part.state();
    state.segments = {{0, 100}, {2 * kSumElements, 50}};
    request.hyper_of_segment = {0, 0};
    request.names = {"first", "second"};
    Pool pool(kernel_table(""), 1, {});
    bool refused = false;
    try {
        wait(pool.update(state, request, {}));
    } catch (const std::runtime_error& error) {
        refused = std::string(error.what()).find("exp_avg of second is not what was written") !=
                  std::string::npos;
    }
    CHECK(refused);
    for (std::size_t i = 2 * kSumElements; i < elements; ++i) {
        CHECK(same(before[i], part.master[i]));
    }
}

}  // namespace
}  // namespace forebay::test
