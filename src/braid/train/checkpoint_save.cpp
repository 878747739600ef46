// Saving a checkpoint: gathers whole tensors over tp, writes them into a partial folder, renames it.
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <utility>

#include "braid/comm/collectives.h"
#include "braid/comm/texts.h"
#include "braid/core/check.h"
#include "braid/core/file.h"
#include "braid/train/checkpoint.h"
#include "braid/train/checkpoint_files.h"

namespace braid {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using namespace checkpoint_files;  // NOLINT: their names

std::string system_error() { return std::strerror(errno); }

// Removes what a killed save left in `dir`; the caller holds the lock.
void discard_leftovers(const std::string& dir, std::error_code& error) {
  fs::remove_all(fs::path(dir) / kPartial, error);
  for (const char* name : {kLatestLink, kModel, kConfig, kLatestIteration})
    remove_partials(fs::path(dir) / name);
}

// The folder of a save while it is being written, and the lock that keeps other runs out of `dir` meanwhile.
class PartialFolder {
 public:
  explicit PartialFolder(std::string dir) : dir_(std::move(dir)), path_(fs::path(dir_) / kPartial) {
    check_save_folder(dir_);
    std::error_code error;
    fs::create_directories(dir_, error);
    TORCH_CHECK(!error, "can't make the folder ", dir_, ": ", error.message());
    lock_ = ::open(dir_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    TORCH_CHECK(lock_ >= 0, "can't open the folder ", dir_, ": ", system_error());
    if (::flock(lock_, LOCK_EX | LOCK_NB) != 0) {
      const bool is_locked = errno == EWOULDBLOCK;
      const std::string reason = is_locked ? "another run is saving there" : system_error();
      ::close(lock_);
      TORCH_CHECK(false, "can't save into ", dir_, ": ", reason);
    }
    discard_leftovers(dir_, error);
    if (!error) fs::create_directory(path_, error);
    if (error) ::close(lock_);
    TORCH_CHECK(!error, "can't make the folder ", path_, ": ", error.message());
  }

  ~PartialFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
    ::close(lock_);
  }
  PartialFolder(const PartialFolder&) = delete;
  PartialFolder& operator=(const PartialFolder&) = delete;

  std::string operator/(const char* name) const { return fs::path(path_) / name; }

  // Makes it the folder `name` of dir, and that the latest.
  void commit(const std::string& name, std::int64_t iteration) {
    sync_folder(path_);
    const std::string target = fs::path(dir_) / name;
    int failed = ::rename(path_.c_str(), target.c_str());
    if (failed != 0 &&
        (errno == ENOTEMPTY ||
         errno == EEXIST)) {  // saved before, by a run that went on from an older one
      failed = ::renameat2(AT_FDCWD, path_.c_str(), AT_FDCWD, target.c_str(), RENAME_EXCHANGE);
    }
    TORCH_CHECK(failed == 0, "can't rename ", path_, " to ", target, ": ", system_error());
    sync_folder(dir_);
    replace_link(fs::path(dir_) / kLatestLink, name);
    for (const char* file : {kModel, kConfig})
      replace_link(fs::path(dir_) / file, fs::path(kLatestLink) / file);
    replace_file(fs::path(dir_) / kLatestIteration, fmt::format("{}\n", iteration));
  }

 private:
  std::string dir_, path_;
  int lock_ = -1;
};

// The writer's fortune, shared by all ranks: tp rank 0 of dp rank 0 tells its tp group, whose
// members tell their dp peers.
class Writer {
 public:
  Writer(const Group& tp, const Group& dp) : tp_(tp), dp_(dp) {}

  bool is_here() const { return tp_.rank() == 0 && dp_.rank() == 0; }

  // Collective: runs fn on the writer. Throws on every rank what it throws there.
  void run(const std::function<void()>& fn) const {
    std::string error;
    if (is_here()) {
      try {
        fn();
      } catch (const c10::Error& e) {
        error = e.what_without_backtrace();
      } catch (const std::exception& e) {
        error = e.what();
      }
    }
    if (dp_.rank() == 0) error = broadcast_text(tp_, error, 0);
    error = broadcast_text(dp_, error, 0);
    TORCH_CHECK(error.empty(), error);
  }

 private:
  const Group &tp_, &dp_;
};

// begin and length of every rank's slice of each part: [R, parts, 2]. Collective over tp.
at::Tensor gather_ranges(const Group& tp, const std::vector<PartPlace>& places) {
  at::Tensor mine = at::empty({1, static_cast<std::int64_t>(places.size()), 2}, at::kLong);
  auto* next = mine.mutable_data_ptr<std::int64_t>();
  for (const PartPlace& place : places) {
    const Part& part = *place.part;
    *next++ = part.dim < 0 ? 0 : part.begin;
    *next++ = part.dim < 0 ? part.shape[0] : part.length;
  }
  return all_gather(tp, mine, std::vector<std::int64_t>(static_cast<std::size_t>(tp.size()), 1));
}

// The whole tensor of which `slice` is this rank's part. Collective over tp.  ranges: [R, 2], see
// gather_ranges
at::Tensor gather_whole(const Group& tp, const Part& part, const at::Tensor& slice,
                        const at::Tensor& ranges) {
  if (part.dim < 0) return slice;
  const at::Tensor begins = ranges.select(1, 0), lengths = ranges.select(1, 1).contiguous();
  const auto* rows = lengths.const_data_ptr<std::int64_t>();
  const at::Tensor gathered = all_gather(tp, slice.movedim(part.dim, 0), {rows, rows + tp.size()});
  if (at::equal(begins, lengths.cumsum(0) - lengths)) return gathered.movedim(0, part.dim);
  // Some ranks hold the same rows, e.g. the heads of a key that has fewer than there are ranks.
  at::Tensor whole = at::empty(part.shape, slice.options()).movedim(part.dim, 0);
  std::int64_t row = 0;
  for (int rank = 0; rank < tp.size(); ++rank) {
    whole.narrow(0, begins[rank].item<std::int64_t>(), rows[rank])
        .copy_(gathered.narrow(0, row, rows[rank]));
    row += rows[rank];
  }
  return whole.movedim(0, part.dim);
}

// Every row of the whole must come from some rank.
void check_coverage(const std::vector<PartPlace>& places, const at::Tensor& ranges) {
  for (std::size_t i = 0; i < places.size(); ++i) {
    const Part& part = *places[i].part;
    if (part.dim < 0) continue;
    at::Tensor seen = at::zeros({part.shape[static_cast<std::size_t>(part.dim)]}, at::kBool);
    for (std::int64_t rank = 0; rank < ranges.size(0); ++rank) {
      const at::Tensor range = ranges[rank][static_cast<std::int64_t>(i)];
      seen.narrow(0, range[0].item<std::int64_t>(), range[1].item<std::int64_t>()).fill_(true);
    }
    TORCH_INTERNAL_ASSERT(seen.all().item<bool>(), "no rank holds all of ", part.name);
  }
}

}  // namespace

void check_save_folder(const std::string& dir) {
  std::error_code ignored;
  for (const char* name : {kLatestLink, kModel, kConfig}) {
    const fs::path path = fs::path(dir) / name;
    const auto type = fs::symlink_status(path, ignored).type();
    BRAID_CHECK(type == fs::file_type::not_found || type == fs::file_type::symlink ||
                    type == fs::file_type::none,
                "can't save into ", dir, ": ", path.string(),
                " is not a link that a save made, and would be overwritten. HINT: save into "
                "another folder");
  }
  fs::path existing = fs::absolute(dir, ignored);
  while (!fs::exists(existing, ignored) && existing.has_relative_path())
    existing = existing.parent_path();
  BRAID_CHECK(fs::is_directory(existing, ignored), "can't save into ", dir, ": ", existing.string(),
              " is not a folder");
  BRAID_CHECK(::access(existing.c_str(), W_OK | X_OK) == 0, "can't save into ", dir, ": ",
              existing.string(), ": ", system_error());
}

void discard_partial_checkpoint(const std::string& dir) noexcept {
  const int lock = ::open(dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (lock < 0) return;
  std::error_code ignored;
  if (::flock(lock, LOCK_EX | LOCK_NB) == 0) discard_leftovers(dir, ignored);
  ::close(lock);
}

void save_checkpoint(const std::string& dir, const Group& tp, const Group& dp,
                     const std::vector<Parameter>& parameters, const AdamW& optimizer,
                     const TrainerState& state, const json& config_json) {
  const std::vector<PartPlace> places = places_of(parameters);

  // What goes into each file, in the order in which it is gathered.
  struct Item {
    TensorInfo info;
    std::size_t place;
    at::Tensor tensor;
  };
  std::vector<Item> weights, moments;
  for (std::size_t i = 0; i < places.size(); ++i) {
    const PartPlace& place = places[i];
    const Part& part = *place.part;
    const Parameter& parameter = parameters[place.parameter];
    const auto add = [&](std::vector<Item>& items, const std::string& prefix,
                         const at::Tensor& tensor) {
      items.push_back(
          {{prefix + part.name, tensor.scalar_type(), part.shape}, i, place.slice(tensor)});
    };
    add(weights, "", parameter.value);
    add(moments, kFirstMomentPrefix, optimizer.exp_avg()[place.parameter]);
    add(moments, kSecondMomentPrefix, optimizer.exp_avg_sq()[place.parameter]);
    if (parameter.value.scalar_type() != at::kFloat) add(moments, kMainPrefix, parameter.main);
  }

  const Writer writer(tp, dp);
  std::unique_ptr<PartialFolder> partial;
  at::Tensor ranges;
  writer.run([&] { partial = std::make_unique<PartialFolder>(dir); });
  if (dp.rank() == 0) {
    ranges = gather_ranges(tp, places);
    check_coverage(places, ranges);
  }
  const auto write_tensors = [&](const char* name, const std::vector<Item>& items) {
    std::unique_ptr<SafetensorsWriter> file;
    writer.run([&] {
      std::vector<TensorInfo> infos;
      for (const Item& item : items) infos.push_back(item.info);
      file = std::make_unique<SafetensorsWriter>(*partial / name, std::move(infos));
    });
    for (const Item& item : items) {
      at::Tensor whole;
      if (dp.rank() == 0) {
        whole = gather_whole(tp, *places[item.place].part, item.tensor,
                             ranges.select(1, static_cast<std::int64_t>(item.place)));
      }
      writer.run([&] { file->write(item.info.name, whole); });
    }
    writer.run([&] { file->commit(); });
  };
  write_tensors(kModel, weights);
  write_tensors(kOptimizer, moments);
  writer.run([&] {
    const json text = {{"format_version", kFormatVersion},
                       {"iteration", state.iteration},
                       {"consumed_samples", state.consumed_samples},
                       {"seed", state.seed},
                       {"data_tokens", state.data_tokens},
                       {"optimizer_steps", optimizer.num_steps()},
                       {"config", state.config},
                       {"tuner", state.tuner}};
    replace_file(*partial / kConfig, config_json.dump(2) + "\n");
    replace_file(*partial / kState, text.dump(2) + "\n");
    partial->commit(iteration_folder(state.iteration), state.iteration);
  });
}

}  // namespace braid
