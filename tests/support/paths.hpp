// SPDX-License-Identifier: MIT
// Where the tests' files are: known to one object alone, so that compiled tests serve any checkout.
#pragma once

#include <string>

namespace paths {

std::string source(const std::string& file);  ///< of the source tree, `file` relative to its root
std::string gguf();                           ///< the bundled model as GGUF; empty: none was made

inline std::string data(const std::string& file) { return source("tests/data/" + file); }
inline std::string docs(const std::string& file) { return source("docs/" + file); }
inline std::string models() { return source("examples/models"); }

}  // namespace paths
