// A whole training run on this rank: data, checkpoints, metrics, validation, trace.
#pragma once

#include "braid/comm/mesh.h"
#include "braid/comm/place.h"
#include "braid/train/config.h"

namespace braid {

/// Reads what the settings name and checks that it fits: data, checkpoint to load, folder to save
/// in. Sends nothing and writes nothing, so that mistakes come before any rank has started.
///   config  validated
///   Errors  ValueError naming the flag
void check_inputs(const TrainConfig& config);

/// Joins the run, checks that all ranks have the same settings, and connects them.
///   config  validated
///   Order   collective over all ranks, once
///   Errors  as join_run's and check_same's
Mesh start_training(const TrainConfig& config, const Place& place);

/// Trains as the settings say. Rank 0 shows progress and writes <output-dir>/metrics.jsonl,
/// checkpoints and the trace.
///   config  validated
///   Order   collective over all ranks
///   Errors  as Trainer's; c10::Error when a file can't be written
void run_training(const TrainConfig& config, const Place& place);

}  // namespace braid
