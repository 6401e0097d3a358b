# SPDX-License-Identifier: MIT
"""kvmeld for Conan 2: `conan create .packaging/conan`."""

import re
from pathlib import Path

from conan import ConanFile
from conan.tools.cmake import CMake, CMakeToolchain, cmake_layout
from conan.tools.files import copy, load


class Kvmeld(ConanFile):
    name = "kvmeld"
    license = "MIT"
    description = "KV-cache compression policies for LLM inference engines"
    topics = ("llm", "kv-cache", "inference", "header-only")
    settings = "os", "compiler", "build_type", "arch"
    options = {"c": [True, False]}  # the library for C: minutes of compiling
    default_options = {"c": False}
    generators = ("CMakeDeps",)

    @property
    def _root(self):
        return Path(self.recipe_folder).parents[1]

    def set_version(self):
        config = load(self, self._root / "include/kvmeld/config.hpp")
        self.version = ".".join(re.findall(r"#define KVMELD_VERSION_(?:MAJOR|MINOR|PATCH) +(\d+)", config))

    def export_sources(self):
        for pattern in ("CMakeLists.txt", "LICENSE", "include/*", "cuda/*"):
            copy(self, pattern, self._root, self.export_sources_folder)

    def layout(self):
        cmake_layout(self)

    def requirements(self):
        self.requires("eigen/3.4.0", transitive_headers=True)

    def package_id(self):
        if not self.info.options.c:
            self.info.settings.clear()

    def generate(self):
        toolchain = CMakeToolchain(self)
        for part in ("TESTS", "BENCH", "EXAMPLES"):
            toolchain.cache_variables[f"KVMELD_BUILD_{part}"] = False
        toolchain.cache_variables["KVMELD_BUILD_C"] = bool(self.options.c)
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        CMake(self).install()
        copy(self, "LICENSE", self.source_folder, Path(self.package_folder) / "licenses")

    def package_info(self):
        self.cpp_info.set_property("cmake_find_mode", "none")  # the package has its own
        self.cpp_info.builddirs = ["share/cmake/kvmeld"]
        self.cpp_info.libs = ["kvmeld"] if self.options.c else []
