// SPDX-License-Identifier: MIT
/// `--calibrate`: the means of a model's queries, in a file of safetensors. It is made of the text
/// prompts of a run; in a later run `triattention` scores by it, and not by the prompt's own.
#pragma once

#include <fmt/format.h>

#include <filesystem>
#include <fstream>
#include <memory>  // std::make_shared
#include <string>
#include <vector>

#include "engine/error.hpp"
#include "engine/safetensors.hpp"
#include "evaluate/dataset.hpp"
#include "evaluate/plan.hpp"

namespace evaluate {

/// Does it measure the prompt's own queries for what a calibration has?
inline bool measures_calibration(const named_policy& n) {
  return n.policy.name() == kvmeld::triattention::name() && n.queries == query_source::own;
}

/// `[full layers · KV heads, group · (dim + dim / 2)]`, each row as `kvmeld::triattention` takes
/// it.
inline row_major_matrix empty_calibration(const engine::config& shape) {
  return row_major_matrix::Zero(shape.full_heads(),
                                Eigen::Index{shape.group()} * (shape.dim + shape.dim / 2));
}

/// Gives the calibration in `file` to the contenders that it is for; false: there is no such file.
/// Throws `usage_error`: there are no such contenders; `engine::format_error`: something else,
/// another model's, numbers that are not finite.
inline bool load_calibration(plan& todo, const std::filesystem::path& file,
                             const engine::config& shape) {
  if (!std::filesystem::exists(file)) {
    return false;
  }
  const auto size = empty_calibration(shape);
  const row_major_matrix& known =
      *(todo.calibration =
            std::make_shared<const row_major_matrix>(engine::safetensors_file(file).matrix(
                "queries", static_cast<index_t>(size.rows()), static_cast<index_t>(size.cols()))));
  if (!known.allFinite()) {
    throw engine::format_error(file, "tensor \"queries\": expected finite numbers, got others");
  }
  index_t calibrated = 0;
  for (entry* const e : entries_of(todo)) {
    e->chosen.policy.visit([&](auto one) {
      if constexpr (requires { one.calibration; }) {
        for (Eigen::Index h = 0; h < known.rows(); ++h) {
          one.calibration = {known.row(h).data(), as_size(known.cols())};
          e->chosen.of_heads.emplace_back(one);
        }
        ++calibrated;
      }
    });
  }
  detail::require(calibrated > 0, "--calibrate: expected triattention among the policies");
  return true;
}

/// The one policy that `file` can be made by, of `todo.policies`, on all of the run's `prompts`.
/// Throws `usage_error`: none, several, no folder for the file.
inline std::size_t calibrating(plan& todo, index_t prompts, const std::filesystem::path& file) {
  const auto count = std::ranges::count_if(todo.policies, measures_calibration);
  detail::require(
      count == 1,
      fmt::format("--calibrate: to make the file, expected triattention on its own queries once, "
                  "got {}",
                  count));
  detail::require(
      std::filesystem::is_directory(std::filesystem::absolute(file).parent_path()),
      "--calibrate: expected a file in a folder that exists, got '" + file.string() + "'");
  todo.prompts = prompts;
  return as_size(std::ranges::find_if(todo.policies, measures_calibration) - todo.policies.begin());
}

/// Makes `file` of what policy `measured` counted of the prompts, which count alike.
inline void save_calibration(std::size_t measured, const engine::config& shape,
                             const std::vector<text_prompt>& prompts,
                             const std::filesystem::path& file) {
  row_major_matrix mean = empty_calibration(shape);
  kvmeld::cache kv(shape.attention(0), {.capacity = 1});  // as all of them are
  for (const text_prompt& p : prompts) {
    for (Eigen::Index h = 0; h < mean.rows(); ++h) {
      const auto row =
          kvmeld::triattention::statistics(kv.head(0), p.read.measured[measured].heads[as_size(h)]);
      mean.row(h) += Eigen::Map<const engine::row_vector>(row.data(), mean.cols()) /
                     static_cast<float>(prompts.size());
    }
  }
  const std::size_t bytes = sizeof(float) * as_size(mean.size());
  const std::string header =
      fmt::format(R"({{"queries":{{"dtype":"F32","shape":[{},{}],"data_offsets":[0,{}]}}}})",
                  mean.rows(), mean.cols(), bytes);
  const std::uint64_t length = header.size();
  std::ofstream out(file, std::ios::binary);
  out.write(reinterpret_cast<const char*>(&length), sizeof length) << header;
  out.write(reinterpret_cast<const char*>(mean.data()), static_cast<std::streamsize>(bytes));
  detail::require(out.flush().good(),
                  "--calibrate: expected a file to write, got '" + file.string() + "'");
}

}  // namespace evaluate
