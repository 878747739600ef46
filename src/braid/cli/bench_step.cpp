// braid bench step: a training step with random tokens, and how much of its communication is hidden.
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "braid/cli/bench.h"
#include "braid/comm/collectives.h"
#include "braid/train/trainer.h"

namespace braid::cli {

void bench_step(const TrainConfig& config, const Place& place, bool json) {
  const auto store = connect_store(place, env().timeout);
  share_cores(place, *store);
  const Mesh mesh = make_mesh(store, place.rank, place.world_size,
                              static_cast<int>(config.tensor_model_parallel_size));
  Trainer trainer(config, mesh, [&](std::int64_t iteration, std::int64_t micro_batch) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(
        static_cast<std::uint64_t>((iteration * 1000 + micro_batch) * 1000 + mesh.dp->rank()));
    const at::Tensor text =
        at::randint(config.vocab_size, {config.seq_length + 1, config.micro_batch_size}, generator,
                    at::TensorOptions(at::kLong));
    return Batch{text.narrow(0, 0, config.seq_length).contiguous(),
                 text.narrow(0, 1, config.seq_length).contiguous()};
  });
  std::map<std::string, trace::Totals> measured, serial;
  std::int64_t iteration = 0;
  const int rounds = static_cast<int>(config.train_iters);
  // Both kinds in every round, so that the machine's moods meet both; the first round warms up.
  const auto times =
      time_interleaved(*mesh.world,
                       {{"step",
                         [&] {
                           for (const auto& [op, totals] : trainer.step(iteration).totals)
                             if (iteration > 0) measured[op] += totals;
                         }},
                        {"serial",
                         [&] {
                           for (const auto& [op, totals] : trainer.serial_step(iteration))
                             if (iteration > 0) serial[op] += totals;
                           ++iteration;
                         }}},
                       rounds);
  if (place.rank != 0) return;
  const auto rows = overlap_by_operation(measured, rounds, serial, rounds);
  Overlap overlap = total_overlap(rows);
  overlap.compute_s = times[0] - overlap.exposed_s;
  const nlohmann::json line{
      {"step_s", times[0]},
      {"compute_s", overlap.compute_s},
      {"comm_s", overlap.comm_s},
      {"hidden_comm_s", overlap.hidden_s},
      {"exposed_comm_s", overlap.exposed_s},
      {"tokens_per_s", static_cast<double>(trainer.tokens_per_step()) / times[0]},
      {"tflop_s_per_rank", trainer.flops_per_step() / times[0] / place.world_size * 1e-12},
      {"ranks", place.world_size},
      {"tensor_model_parallel_size", config.tensor_model_parallel_size}};
  if (json) {
    fmt::print("{}\n", line.dump());
    return;
  }
  for (const auto& [name, value] : line.items()) fmt::print("{:<28} {}\n", name, value.dump());
  fmt::print("{}", overlap_table(rows));
}

}  // namespace braid::cli
