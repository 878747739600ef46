// braid bench: measures operations and training steps.
#include <algorithm>
#include <map>
#include <memory>

#include "braid/cli/bench.h"
#include "braid/cli/commands.h"
#include "braid/cli/numbers.h"
#include "braid/cli/output.h"
#include "braid/core/check.h"

namespace braid::cli {
namespace {

void add_bench_ops(CLI::App& bench, Body& body) {
  struct Flags {
    OpCase shape;
    std::string dtype;
    int nproc = 0;  // not given
    int rounds = 21;
    bool sweep = false, json = false;
  };
  static const std::map<std::string, at::ScalarType> kDtypes{
      {"f32", at::kFloat}, {"bf16", at::kBFloat16}, {"fp16", at::kHalf}};
  auto flags = std::make_shared<Flags>();
  auto* ops = bench.add_subcommand("ops", "time a collective matmul in every mode");
  auto* sweep =
      ops->add_flag("--sweep", flags->sweep, "the standing set of operations, types and shapes");
  ops->add_option("--op", flags->shape.op, "needed, but for --sweep, which it narrows")
      ->check(CLI::IsMember({"all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"}));
  add_number(*ops, "m", flags->shape.m, kCount, "rows of the whole product");
  add_number(*ops, "n", flags->shape.n, kCount, "columns of the whole product")->excludes(sweep);
  add_number(*ops, "k", flags->shape.k, kCount, "inner dimension of the whole product")
      ->excludes(sweep);
  ops->add_option("--dtype", flags->dtype, "f32 (the default), bf16 or fp16")
      ->check(CLI::IsMember({"f32", "bf16", "fp16"}));
  add_number(*ops, "nproc", flags->nproc, kCount, "ranks to start on this host (2)");
  add_number(*ops, "rounds", flags->rounds, kCount, "interleaved rounds, fewer of long cases");
  ops->add_flag("--json", flags->json, "one JSON line a case");
  ops->callback([flags, &body] {
    body = [flags] {
      std::vector<OpCase> cases = standing_sweep();
      OpCase& shape = flags->shape;
      if (!flags->dtype.empty()) shape.dtype = kDtypes.at(flags->dtype);
      if (flags->sweep) {
        std::erase_if(cases, [&](const OpCase& c) {
          return (!shape.op.empty() && c.op != shape.op) || (shape.m > 0 && c.m != shape.m) ||
                 (!flags->dtype.empty() && c.dtype != shape.dtype);
        });
        BRAID_CHECK(!cases.empty(), "--m is ", shape.m, ", which --sweep does not have");
      } else {
        BRAID_CHECK(!shape.op.empty(), "--op is required");
        for (const auto& [flag, value] :
             {std::pair("--m", shape.m), {"--n", shape.n}, {"--k", shape.k}})
          BRAID_CHECK(value > 0, flag, " is required");
        cases = {shape};
      }
      const Place place = place_from_environment();
      if (place.source.empty() && flags->nproc == 0) flags->nproc = 2;
      const int ranks = place.source.empty() ? flags->nproc : place.world_size;
      BRAID_CHECK(ranks >= 2, "--nproc is ", ranks,
                  ", at least 2 ranks have something to communicate");
      BRAID_CHECK(std::min(cases[0].n, cases[0].k) >= ranks, "--n is ", cases[0].n, " and --k ",
                  cases[0].k, ", at least --nproc ", ranks, " are needed");
      if (const auto code =
              run_on_ranks(flags->nproc > 0 ? std::optional(flags->nproc) : std::nullopt))
        return *code;
      bench_ops(cases, flags->rounds, flags->json, place);
      return 0;
    };
  });
}

void add_bench_int8(CLI::App& bench, Body& body) {
  struct Flags {
    std::int64_t n = 4096, k = 4096;
    int rounds = 21;
    bool json = false;
  };
  auto flags = std::make_shared<Flags>();
  auto* int8 = bench.add_subcommand("int8", "time products with an int8 weight beside ATen's");
  add_number(*int8, "n", flags->n, kCount, "rows of the weight");
  add_number(*int8, "k", flags->k, kCount, "columns of the weight");
  add_number(*int8, "rounds", flags->rounds, kCount, "interleaved rounds");
  int8->add_flag("--json", flags->json, "one JSON line a number of rows");
  int8->callback([flags, &body] {
    body = [flags] {
      bench_int8(flags->n, flags->k, flags->rounds, flags->json);
      return 0;
    };
  });
}

void add_bench_step(CLI::App& bench, Body& body) {
  auto* step = bench.add_subcommand(
      "step", "time a training step; takes the flags of braid train, and --json");
  step->prefix_command();
  step->set_help_flag();
  step->callback([step, &body] {
    body = [arguments = step->remaining()] {
      TrainConfig config;
      config.train_iters = 10;
      bool json = false;
      CLI::App flags{"Times training steps on random tokens; --train-iters of them are measured.",
                     "braid bench step"};
      add_flags(flags, config, /*needs_data=*/false);
      flags.add_flag("--json", json, "one JSON line");
      if (const auto text = parse(flags, arguments)) {
        print_text(*text);
        return 0;
      }
      const Place place = place_from_environment();
      if (const auto code = run_on_ranks(config, place, /*needs_data=*/false)) return *code;
      bench_step(config, place, json);
      return 0;
    };
  });
}

}  // namespace

void add_bench(CLI::App& app, Body& body) {
  auto* bench =
      app.add_subcommand("bench", "measure operations (ops, int8) or training steps (step)");
  bench->require_subcommand(1);
  add_bench_ops(*bench, body);
  add_bench_int8(*bench, body);
  add_bench_step(*bench, body);
}

}  // namespace braid::cli
