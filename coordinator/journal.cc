#include "coordinator/journal.h"

#include <fmt/format.h>
#include <sqlite3.h>

#include <string_view>
#include <type_traits>

#include "common/error.h"
#include "coordinator/json_lines.h"

namespace muster {

namespace {

constexpr int kJournalFormat = 1;
constexpr int kBusyMs = 5000;

constexpr const char* kSchema = R"(
CREATE TABLE IF NOT EXISTS run(key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS generations(generation INTEGER PRIMARY KEY, time TEXT NOT NULL,
  world_size INTEGER NOT NULL, resume_step INTEGER NOT NULL, reason TEXT NOT NULL, members TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS steps(step INTEGER PRIMARY KEY, generation INTEGER NOT NULL, time TEXT NOT NULL,
  tokens INTEGER NOT NULL, loss REAL);
CREATE TABLE IF NOT EXISTS checkpoints(step INTEGER PRIMARY KEY, generation INTEGER NOT NULL, time TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS events(id INTEGER PRIMARY KEY, time TEXT NOT NULL, kind TEXT NOT NULL,
  reason TEXT NOT NULL);
)";

}  // namespace

struct Journal::Impl {
  explicit Impl(std::string file) : path(std::move(file)) {}
  ~Impl() { sqlite3_close_v2(db); }

  void check(int code) const {
    if (code == SQLITE_OK || code == SQLITE_ROW || code == SQLITE_DONE) return;
    std::string hint;
    if (code == SQLITE_NOTADB || code == SQLITE_CORRUPT) {
      hint = ": move it away; the run resumes from its newest checkpoint without it";
    }
    throw IoError(
        fmt::format("{}: {}{}", path, db != nullptr ? sqlite3_errmsg(db) : "out of memory", hint));
  }

  void execute(const char* sql) const { check(sqlite3_exec(db, sql, nullptr, nullptr, nullptr)); }

  class Statement {
   public:
    Statement(const Impl& impl, const char* sql) : impl_(impl) {
      impl.check(sqlite3_prepare_v2(impl.db, sql, -1, &statement_, nullptr));
    }
    ~Statement() { sqlite3_finalize(statement_); }
    Statement(const Statement&) = delete;
    Statement& operator=(const Statement&) = delete;

    template <typename T>
    Statement& bind(const T& value) {
      ++index_;
      if constexpr (std::is_floating_point_v<T>) {
        impl_.check(sqlite3_bind_double(statement_, index_, value));
      } else if constexpr (std::is_integral_v<T>) {
        impl_.check(sqlite3_bind_int64(statement_, index_, static_cast<int64_t>(value)));
      } else {
        const std::string_view text = value;
        impl_.check(sqlite3_bind_text(statement_, index_, text.data(),
                                      static_cast<int>(text.size()), SQLITE_TRANSIENT));
      }
      return *this;
    }
    void run() { impl_.check(sqlite3_step(statement_)); }
    bool next() {
      const int code = sqlite3_step(statement_);
      impl_.check(code);
      return code == SQLITE_ROW;
    }
    int64_t integer_at(int column) { return sqlite3_column_int64(statement_, column); }
    std::string text() {
      const auto* bytes = reinterpret_cast<const char*>(sqlite3_column_text(statement_, 0));
      return bytes == nullptr ? "" : bytes;
    }
    int64_t integer() {
      run();
      return sqlite3_column_int64(statement_, 0);
    }

   private:
    const Impl& impl_;
    sqlite3_stmt* statement_ = nullptr;
    int index_ = 0;
  };

  std::string path;
  sqlite3* db = nullptr;
};

Journal::Journal(const std::string& path) : impl_(std::make_unique<Impl>(path)) {
  impl_->check(sqlite3_open(path.c_str(), &impl_->db));
  sqlite3_busy_timeout(impl_->db, kBusyMs);
  // A step's commit need not reach the disk at once: checkpoints, not the journal, carry the state.
  impl_->execute("PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;");
  const int64_t format = Impl::Statement(*impl_, "PRAGMA user_version").integer();
  if (format > kJournalFormat) {
    throw IoError(fmt::format("{}: written by a newer muster (format {}, this one knows {})", path,
                              format, kJournalFormat));
  }
  impl_->execute(kSchema);
  impl_->execute(fmt::format("PRAGMA user_version={}", kJournalFormat).c_str());
}

Journal::~Journal() = default;

uint64_t Journal::last_generation() const {
  return static_cast<uint64_t>(
      Impl::Statement(*impl_, "SELECT coalesce(max(generation), 0) FROM generations").integer());
}

int64_t Journal::last_step() const {
  return Impl::Statement(*impl_, "SELECT coalesce(max(step), 0) FROM steps").integer();
}

std::string Journal::run_value(const std::string& key) const {
  Impl::Statement statement(*impl_, "SELECT value FROM run WHERE key = ?");
  return statement.bind(key).next() ? statement.text() : "";
}

std::map<int64_t, int64_t> Journal::token_history(int64_t count) const {
  Impl::Statement statement(*impl_,
                            "SELECT step, sum(tokens) OVER (ORDER BY step) FROM steps "
                            "ORDER BY step DESC LIMIT ?");
  statement.bind(count);
  std::map<int64_t, int64_t> history;
  while (statement.next()) history[statement.integer_at(0)] = statement.integer_at(1);
  return history;
}

void Journal::set_run(const std::string& key, const std::string& value) {
  Impl::Statement(*impl_, "INSERT OR REPLACE INTO run VALUES(?, ?)").bind(key).bind(value).run();
}

void Journal::begin_generation(uint64_t generation, int world_size, int64_t resume_step,
                               const std::string& reason, const std::string& members_json) {
  // The steps first: a crash between the two leaves fewer steps, never too many.
  Impl::Statement(*impl_, "DELETE FROM steps WHERE step > ?").bind(resume_step).run();
  Impl::Statement(*impl_, "INSERT INTO generations VALUES(?, ?, ?, ?, ?, ?)")
      .bind(generation)
      .bind(timestamp())
      .bind(world_size)
      .bind(resume_step)
      .bind(reason)
      .bind(members_json)
      .run();
}

void Journal::commit_step(int64_t step, uint64_t generation, int64_t tokens, double loss) {
  Impl::Statement(*impl_, "INSERT OR REPLACE INTO steps VALUES(?, ?, ?, ?, ?)")
      .bind(step)
      .bind(generation)
      .bind(timestamp())
      .bind(tokens)
      .bind(loss)
      .run();
}

void Journal::commit_checkpoint(int64_t step, uint64_t generation) {
  Impl::Statement(*impl_, "INSERT OR REPLACE INTO checkpoints VALUES(?, ?, ?)")
      .bind(step)
      .bind(generation)
      .bind(timestamp())
      .run();
}

void Journal::add_event(const std::string& kind, const std::string& reason) {
  Impl::Statement(*impl_, "INSERT INTO events(time, kind, reason) VALUES(?, ?, ?)")
      .bind(timestamp())
      .bind(kind)
      .bind(reason)
      .run();
}

}  // namespace muster
