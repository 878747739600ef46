// A small model, a text for it, and trainers of it whose ranks are threads.
#pragma once

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "braid/train/trainer.h"
#include "tests/support/folders.h"
#include "tests/support/text.h"

namespace braid::test {

/// Nothing in it divides by more than it must: 259 tokens, 3 layers, tied weights.
inline TrainConfig small_model() {
  TrainConfig config;
  config.num_layers = 3;
  config.hidden_size = 64;
  config.ffn_hidden_size = 92;
  config.num_attention_heads = 8;
  config.num_query_groups = 4;
  config.seq_length = 24;
  config.vocab_size = 259;
  config.micro_batch_size = 2;
  config.global_batch_size = 8;
  config.train_iters = 20;
  config.lr = 1e-2;
  config.lr_warmup_iters = 4;
  config.init_method_std = 0.1;
  return config;
}

using OnRank = std::function<void(Trainer& trainer, const DataSplit& data, int rank)>;

/// Calls fn on a thread for each rank, which has one ATen thread; rethrows the exception of the
/// first rank that has one.
inline void run_trainers(TrainConfig config, int num_ranks, const OnRank& fn,
                         GroupOptions options = {}) {
  EXPECT_LT(validate(config, num_ranks, /*needs_data=*/false).size(), 2u);
  const TemporaryFolder folder;
  const auto corpus = Corpus::open(folder.write("words.txt", words(60000)));
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(num_ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        at::set_num_threads(1);
        const Mesh mesh = make_mesh(store, rank, num_ranks,
                                    static_cast<int>(config.tensor_model_parallel_size), options);
        const auto data =
            split_data(corpus, config.split, config.seq_length, config.vocab_size, config.seed);
        Trainer trainer(config, mesh, [&](std::int64_t iteration, std::int64_t micro_batch) {
          return data.train->batch(
              first_sample(iteration, micro_batch, mesh.dp->rank(), mesh.dp->size(),
                           config.micro_batch_size, config.global_batch_size),
              config.micro_batch_size);
        });
        fn(trainer, data, rank);
      } catch (...) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (const auto& error : errors)
    if (error) std::rethrow_exception(error);
}

}  // namespace braid::test
