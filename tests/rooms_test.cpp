// SPDX-License-Identifier: MIT
// The house: headers lie in rooms, and includes between rooms run one way.
#include <algorithm>
#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <string>
#include <vector>

#include "support/paths.hpp"

namespace rooms_test {

namespace fs = std::filesystem;

/// Rooms from the lowest to the highest. What lies in no folder is the face, above all rooms, but
/// for the headers of `ground`, which are below them.
struct house {
  std::string root;  ///< what includes start with
  std::vector<std::string> rooms, ground;

  std::size_t floor(const std::string& header) const {  // relative to `root`
    const std::size_t slash = header.find('/');
    if (slash == std::string::npos) {
      return std::ranges::count(ground, header) > 0 ? 0 : rooms.size() + 1;
    }
    const auto room = std::ranges::find(rooms, header.substr(0, slash));
    REQUIRE(room != rooms.end());
    return static_cast<std::size_t>(room - rooms.begin()) + 1;
  }
  /// Every include of `text` that leads upwards from `header`.
  std::vector<std::string> upward(const std::string& header, const std::string& text) const {
    static const std::regex include("#include \"([^\"]+)\"");
    std::vector<std::string> found;
    for (std::sregex_iterator i(text.begin(), text.end(), include), end; i != end; ++i) {
      const std::string to = (*i)[1];
      if (to.starts_with(root) && floor(to.substr(root.size())) > floor(header)) {
        found.push_back(header + " -> " + to);
      }
    }
    return found;
  }
};

const house host{"kvmeld/",
                 {"detail", "memory", "score", "search", "merge", "policies", "peers", "compress"},
                 {"config.hpp", "error.hpp", "budget.hpp", "executor.hpp"}};

const house device{
    "kvmeld/cuda/", {"device", "memory", "score", "search", "merge", "policies"}, {}};

std::string read(const fs::path& file) {
  std::ifstream in(file);
  REQUIRE(in);
  return std::string(std::istreambuf_iterator<char>(in), {});
}

void check_house(const house& h, const fs::path& folder, std::size_t most_in_the_face) {
  std::size_t face = 0, headers = 0;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (!entry.is_regular_file()) {
      continue;
    }
    const std::string header = fs::relative(entry.path(), folder).generic_string();
    face += header.find('/') == std::string::npos ? 1 : 0;
    ++headers;
    CHECK(h.upward(header, read(entry.path())) == std::vector<std::string>{});
  }
  CHECK(face <= most_in_the_face);
  CHECK(headers > 40);
}

TEST_CASE("includes between rooms run one way", "[house]") {
  check_house(host, paths::source("include/kvmeld"), 14);
  check_house(device, paths::source("cuda/kvmeld/cuda"), 8);
}

TEST_CASE("what is internal to a room is in the room's namespace", "[house]") {
  // Of these, engines or authors of policies use every name; `dense` is a namespace of its own.
  const std::vector<std::string> exempt{"score/queries.hpp", "score/dense.hpp", "merge/plan.hpp",
                                        "merge/source.hpp", "merge/pages.hpp"};
  for (const std::string room : {"score", "search", "merge"}) {
    for (const auto& entry : fs::directory_iterator(paths::source("include/kvmeld/" + room))) {
      const std::string header = room + "/" + entry.path().filename().string();
      const std::string text = read(entry.path());
      const bool opens = text.find("\nnamespace " + room + " {\n") != std::string::npos;
      CAPTURE(header);
      CHECK(opens != (std::ranges::count(exempt, header) > 0));
      CHECK(text.find("\nnamespace detail {\n") == std::string::npos);
    }
  }
}

TEST_CASE("an include that runs back is seen", "[house]") {
  const std::string up = "#include \"kvmeld/merge/plan.hpp\"\n";
  CHECK(host.upward("memory/view.hpp", up).size() == 1);
  CHECK(host.upward("config.hpp", "#include \"kvmeld/memory/view.hpp\"\n").size() == 1);
  CHECK(host.upward("policies/h2o.hpp", "#include \"kvmeld/compressor.hpp\"\n").size() == 1);
  CHECK(host.upward("policies/h2o.hpp", up).empty());
  CHECK(host.upward("merge/apply.hpp", up).empty());
  CHECK(host.upward("memory/view.hpp", "#include \"kvmeld/config.hpp\"\n").empty());
  const std::string select = "#include \"kvmeld/cuda/search/select.cuh\"\n";
  CHECK(device.upward("score/queries.cuh", select).size() == 1);
  CHECK(device.upward("step.cuh", select).empty());
}

}  // namespace rooms_test
