// The file queue on both backends, under scripted delays, errors and short transfers: no order of
// events loses a byte or hangs, and every completion counts.
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>

#include "check.h"
#include "fixtures.h"
#include "forebay/file_queue.h"

namespace forebay::test {
namespace {

using std::chrono_literals::operator""s;
constexpr std::size_t kPage = kFileAlignment;

// Memory that begins at a multiple of a page.
class Pages {
public:
    explicit Pages(std::size_t pages, std::uint8_t seed = 0) : bytes_(pages * kPage) {
        memory_.reset(static_cast<std::uint8_t*>(std::aligned_alloc(kPage, bytes_ + kPage)));
        for (std::size_t i = 0; i < bytes_; ++i) {
            memory_.get()[i] = seed == 0 ? 0 : static_cast<std::uint8_t>(i * 31 + i / kPage + seed);
        }
    }
    Address address(std::size_t page = 0) const { return address_of(memory_.get() + page * kPage); }
    std::size_t bytes() const { return bytes_; }
    bool operator==(const Pages& other) const {
        return bytes_ == other.bytes_ &&
               std::memcmp(memory_.get(), other.memory_.get(), bytes_) == 0;
    }

private:
    struct Free {
        void operator()(std::uint8_t* memory) const { std::free(memory); }
    };
    std::size_t bytes_;
    std::unique_ptr<std::uint8_t, Free> memory_;
};

// Files without a name, in the working directory.
FileSetPtr files(std::size_t count = 1, std::size_t stripe_pages = 1024) {
    std::vector<int> descriptors;
    std::vector<std::string> names;
    for (std::size_t i = 0; i < count; ++i) {
        char name[] = "forebay-test-XXXXXX";
        descriptors.push_back(::mkstemp(name));
        CHECK(descriptors.back() >= 0);
        ::unlink(name);
        names.push_back("file " + std::to_string(i));
    }
    auto set = std::make_shared<const FileSet>(descriptors, names, stripe_pages * kPage);
    for (const int descriptor : descriptors) {
        ::close(descriptor);
    }
    return set;
}

std::vector<FileBackendPtr> backends(std::size_t depth) {
    std::vector<FileBackendPtr> list{make_thread_backend(depth)};
    try {
        list.push_back(make_uring_backend(depth));
    } catch (const std::runtime_error& error) {
        std::printf("without io_uring: %s\n", error.what());
    }
    return list;
}

void for_each_backend(std::size_t depth, const FileScript& script,
                      const std::function<void(FileQueue&)>& body, Refill refill = Refill::at_once,
                      Handover handover = Handover::batched) {
    for (const FileBackendPtr& backend : backends(depth)) {
        FileQueueOptions options{depth, 4 * kPage, handover, refill, "test"};
        FileQueue queue(make_scripted_backend(backend, script), options);
        body(queue);
    }
}

void wait(const TicketPtr& ticket) { CHECK(ticket->wait_for(Ticket::Until::done, 60s)); }

std::string failure_of(const TicketPtr& ticket) {
    try {
        wait(ticket);
    } catch (const std::runtime_error& error) {
        return error.what();
    }
    return "";
}

bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
}

void write_and_read_back(FileQueue& queue, const FileSetPtr& set, std::size_t pages) {
    const Pages source(pages, 7);
    const Pages target(pages);
    const TicketPtr written =
        queue.transfer(FileAction::write, set, {{kPage, source.address(), source.bytes()}}, {});
    FileOrder order;
    order.after = {written};
    const TicketPtr read = queue.transfer(
        FileAction::read, set, {{kPage, target.address(), target.bytes()}}, std::move(order));
    wait(read);
    CHECK(written->pieces_done() == 1 && read->pieces_done() == 1);
    CHECK(target == source);
}

TEST(files_bring_back_what_was_written) {
    for (const std::size_t pages : {0, 1, 3, 4, 5, 37}) {
        for (const std::size_t depth : {1, 2, 8}) {
            for_each_backend(depth, {}, [&](FileQueue& queue) {
                write_and_read_back(queue, files(), pages);
                CHECK(queue.counters().bytes_read == pages * kPage);
                CHECK(queue.counters().bytes_written == pages * kPage);
            });
        }
    }
}

TEST(files_late_and_out_of_order) {
    for (std::uint64_t seed = 0; seed < 4; ++seed) {
        for_each_backend(4, {seed, 300},
                         [&](FileQueue& queue) { write_and_read_back(queue, files(), 41); });
    }
    for_each_backend(
        4, {9, 100}, [&](FileQueue& queue) { write_and_read_back(queue, files(), 41); },
        Refill::when_empty, Handover::single);
}

TEST(files_striped_over_several) {
    for (const std::size_t stripe : {1, 2, 8}) {
        for_each_backend(4, {1, 50}, [&](FileQueue& queue) {
            const FileSetPtr set = files(3, stripe);
            write_and_read_back(queue, set, 29);
            for (std::size_t i = 0; i < 3; ++i) {
                const off_t end = ::lseek(set->descriptor(i), 0, SEEK_END);
                CHECK(end >= static_cast<off_t>(8 * kPage) && end < static_cast<off_t>(20 * kPage));
            }
        });
    }
}

TEST(file_pieces_follow_pieces) {
    for_each_backend(3, {3, 200}, [&](FileQueue& queue) {
        const FileSetPtr set = files();
        const Pages source(12, 5);
        const Pages target(12);
        std::vector<FileSpan> out;
        std::vector<FileSpan> in;
        for (std::size_t i = 0; i < 12; ++i) {
            out.push_back({i * kPage, source.address(i), kPage});
            in.push_back({i * kPage, target.address(i), kPage});
        }
        FileOrder order;
        order.piecewise = queue.transfer(FileAction::write, set, out, {});
        wait(queue.transfer(FileAction::read, set, in, std::move(order)));
        CHECK(target == source);
    });
}

TEST(file_errors_name_everything) {
    for_each_backend(2, {0, 0, 2}, [&](FileQueue& queue) {
        const FileSetPtr set = files();
        const Pages source(16, 3);
        const TicketPtr broken =
            queue.transfer(FileAction::write, set, {{0, source.address(), source.bytes()}}, {});
        FileOrder order;
        order.after = {broken};
        const TicketPtr later =
            queue.transfer(FileAction::read, set, {{0, source.address(), kPage}}, std::move(order));
        const std::string text = failure_of(broken);
        CHECK(contains(text, "writing 16384 bytes at byte 32768 of file 0 failed"));
        CHECK(contains(text, "errno 5"));
        CHECK(failure_of(later) == text);
        write_and_read_back(queue, set, 5);  // the queue itself goes on
    });
}

TEST(file_short_transfers_go_on) {
    for (const std::size_t bytes : {std::size_t{0} + 1, kPage, kPage + 700, 3 * kPage}) {
        for (const std::int64_t at : {0, 1, 5, 9}) {
            for_each_backend(2, {0, 20, -1, 5, at, bytes},
                             [&](FileQueue& queue) { write_and_read_back(queue, files(), 17); });
        }
    }
}

TEST(file_that_ends_early_fails) {
    for_each_backend(2, {}, [&](FileQueue& queue) {
        const Pages target(4);
        const TicketPtr ticket = queue.transfer(FileAction::read, files(),
                                                {{kPage, target.address(), target.bytes()}}, {});
        CHECK(contains(failure_of(ticket), "at byte 4096 of file 0 failed: the file ends there"));
    });
}

TEST(file_without_progress_fails) {
    for_each_backend(1, {}, [&](FileQueue& queue) {
        // A file that ends inside a sector: every attempt brings the same 100 bytes.
        const FileSetPtr set = files();
        const Pages target(1, 1);
        CHECK(::pwrite(set->descriptor(0), reinterpret_cast<void*>(target.address()), 100, 0) ==
              100);
        const TicketPtr ticket =
            queue.transfer(FileAction::read, set, {{0, target.address(), kPage}}, {});
        CHECK(contains(failure_of(ticket), "no progress"));
    });
}

TEST(file_priority_and_cancelling) {
    for_each_backend(1, {0, 3000}, [&](FileQueue& queue) {
        const FileSetPtr set = files();
        const Pages source(400, 9);
        FileOrder late;
        late.priority = 2;
        const TicketPtr bulk = queue.transfer(
            FileAction::write, set, {{0, source.address(), source.bytes()}}, std::move(late));
        const TicketPtr urgent =
            queue.transfer(FileAction::write, set, {{source.bytes(), source.address(), kPage}}, {});
        wait(urgent);
        CHECK(!bulk->ended());
        queue.cancel(bulk);
        CHECK(contains(failure_of(bulk), "cancelled"));
        queue.cancel(urgent);
        CHECK(urgent->done());
    });
}

TEST(file_queue_closes_with_work_in_it) {
    for_each_backend(2, {0, 2000}, [&](FileQueue& queue) {
        const FileSetPtr set = files();
        const Pages source(64, 9);
        std::vector<TicketPtr> tickets;
        for (std::size_t i = 0; i < 8; ++i) {
            tickets.push_back(
                queue.transfer(FileAction::write, set,
                               {{i * source.bytes(), source.address(), source.bytes()}}, {}));
        }
        queue.close();
        queue.close();
        CHECK(contains(failure_of(tickets.back()), "closed"));
        for (const TicketPtr& ticket : tickets) {
            CHECK(ticket->ended());
        }
        bool refused = false;
        try {
            queue.transfer(FileAction::read, set, {{0, source.address(), kPage}}, {});
        } catch (const std::runtime_error&) {
            refused = true;
        }
        CHECK(refused);
    });
}

TEST(many_waiting_jobs_cost_nothing_and_end_in_order) {
    for_each_backend(4, {}, [&](FileQueue& queue) {
        const FileSetPtr set = files();
        const Pages source(1, 9);
        const auto gate = std::make_shared<Ticket>(0);
        FileOrder held;
        held.after = {gate};
        TicketPtr last =
            queue.transfer(FileAction::write, set, {{0, source.address(), kPage}}, std::move(held));
        for (std::size_t i = 1; i < 2000; ++i) {
            FileOrder order;
            order.after = {last};
            last = queue.transfer(FileAction::write, set, {{i * kPage, source.address(), kPage}},
                                  std::move(order));
        }
        // work that waits for nothing goes on beside them
        write_and_read_back(queue, files(), 100);
        CHECK(!last->ended());
        gate->finish();
        wait(last);
        CHECK(queue.counters().bytes_written == (2000 + 100) * kPage);
    });
}

TEST(file_jobs_that_wait_fail_with_what_they_wait_for) {
    for_each_backend(2, {}, [&](FileQueue& queue) {
        const FileSetPtr set = files();
        const Pages source(1, 9);
        const auto gate = std::make_shared<Ticket>(0);
        FileOrder held;
        held.after = {gate};
        const TicketPtr first =
            queue.transfer(FileAction::write, set, {{0, source.address(), kPage}}, std::move(held));
        FileOrder order;
        order.after = {first};
        const TicketPtr second =
            queue.transfer(FileAction::read, set, {{0, source.address(), kPage}}, std::move(order));
        FileOrder third_order;
        third_order.after = {std::make_shared<Ticket>(0)};
        const TicketPtr third = queue.transfer(
            FileAction::read, set, {{0, source.address(), kPage}}, std::move(third_order));
        queue.cancel(third);
        CHECK(contains(failure_of(third), "cancelled"));
        gate->fail("the gate is shut");
        CHECK(failure_of(second) == "the gate is shut");
    });
}

TEST(file_spans_must_be_aligned) {
    for_each_backend(1, {}, [&](FileQueue& queue) {
        const Pages target(2);
        for (const FileSpan& span :
             {FileSpan{1, target.address(), kPage}, FileSpan{0, target.address() + 8, kPage},
              FileSpan{0, target.address(), 512}, FileSpan{0, 0, kPage}}) {
            bool refused = false;
            try {
                queue.transfer(FileAction::read, files(), {span}, {});
            } catch (const std::invalid_argument&) {
                refused = true;
            }
            CHECK(refused);
        }
    });
}

}  // namespace
}  // namespace forebay::test
