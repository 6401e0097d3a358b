# SPDX-License-Identifier: MIT
"""The users' project of tests/consumers on the package."""

from pathlib import Path

from conan import ConanFile
from conan.tools.cmake import CMake, cmake_layout


class Consumer(ConanFile):
    settings = "os", "compiler", "build_type", "arch"
    generators = "CMakeDeps", "CMakeToolchain"

    def layout(self):
        cmake_layout(self)

    def requirements(self):
        self.requires(self.tested_reference_str)

    def build(self):
        cmake = CMake(self)
        cmake.configure(build_script_folder=Path(self.recipe_folder).parents[2] / "tests/consumers/package")
        cmake.build()

    def test(self):
        self.run(str(Path(self.build_folder) / "consumer"), env="conanrun")
