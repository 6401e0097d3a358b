// SPDX-License-Identifier: MIT
#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>

#include "support/random.hpp"

namespace {

/// A test case is the outermost section of each of its runs: one for every section in it, and for
/// everything that it generates.
struct own_data : Catch::TestEventListenerBase {
  using TestEventListenerBase::TestEventListenerBase;

  void sectionStarting(const Catch::SectionInfo& section) override {
    TestEventListenerBase::sectionStarting(section);
    if (m_sectionStack.size() == 1) {
      streams::restart();
    }
  }
};

}  // namespace

CATCH_REGISTER_LISTENER(own_data)
