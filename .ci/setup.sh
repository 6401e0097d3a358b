# SPDX-License-Identifier: MIT
# shellcheck shell=bash
# What examples/run, tests/run and .ci/run share: packages and builds. To be sourced, under `set -euo pipefail`.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
jobs=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}

# fail LOG MESSAGE: says what went wrong, shows where in the log, and ends the script.
fail() {
  printf '\n%s\n' "$2" >&2
  # From the first compiler error on; anything else tells its reason in its last lines.
  { sed -n '/^FAILED:/,$p' "$1" | grep . || tail -n 30 "$1"; } | cut -c1-240 | sed -n '1,30s/^/  | /p' >&2
  printf 'whole log: %s\n' "$1" >&2
  exit 1
}

# nvcc_path: where nvcc is, or its name where there is none.
nvcc_path() { command -v nvcc || { [[ -x /usr/local/cuda/bin/nvcc ]] && echo /usr/local/cuda/bin/nvcc; } || echo nvcc; }

# install_packages [GROUP...]: what is missing of .ci/packages, without its groups `ci` and `llama` unless asked for.
install_packages() {
  command -v dpkg-query >/dev/null || return 0 # no Debian: CMake will say what it lacks
  local wanted installed package missing=() groups=none
  if (($#)); then groups=$(IFS='|' && echo "$*"); fi
  wanted=$(sed -nE -e '/^#/d' -e "/^(ci|llama):/{/^($groups):/!d}" -e 's/^[a-z]+: *//p' "$root/.ci/packages")
  # shellcheck disable=SC2086,SC2016  # a list of words; dpkg-query's own variables
  installed=$(dpkg-query -W -f '${db:Status-Status} ${Package}\n' $wanted 2>/dev/null || true)
  for package in $wanted; do
    grep -qxF "installed $package" <<<"$installed" || missing+=("$package")
  done
  ((${#missing[@]})) || return 0

  local as_root=()
  if ((EUID != 0)); then
    as_root=(sudo)
    if [[ ! -t 0 || ! -t 2 ]]; then as_root+=(-n); fi # nobody there to type a password
    if ! command -v sudo >/dev/null || ! "${as_root[@]}" true; then
      printf 'Packages are missing, and only root can install them. Run this as root, then try again:\n\n  %s\n\n' \
        "apt-get update && apt-get install -y --no-install-recommends ${missing[*]}" >&2
      exit 1
    fi
  fi
  echo "installing: ${missing[*]}"
  mkdir -p "$root/build"
  local log=$root/build/packages.log
  local install=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600)
  # The lists of a fresh system are empty and those of an old one stale: fetch them when the first try fails.
  "${install[@]}" install -y --no-install-recommends "${missing[@]}" >"$log" 2>&1 ||
    { "${install[@]}" update && "${install[@]}" install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1 ||
    fail "$log" "apt-get could not install the packages:"
}

# follow_ninja LOG [VERB]: keeps ninja's output, or lines of the same form, in LOG and shows how far it is: on one line of
# a terminal, every second; elsewhere a line per quarter of the way or half minute.
follow_ninja() {
  local verb=${2:-building} line='' part code far='' quarter=0 shown=0 started=$SECONDS next=30
  while true; do
    code=0
    IFS= read -r -t 1 part || code=$?
    line+=$part
    ((code == 0 || code > 128)) || break # above 128: a second has passed
    if ((code == 0)); then
      printf '%s\n' "$line" >>"$1"
      if [[ $line =~ ^\[([1-9][0-9]*)/([0-9]+)\]\  ]]; then
        far="${BASH_REMATCH[1]} of ${BASH_REMATCH[2]} "
        quarter=$((1 + 4 * BASH_REMATCH[1] / BASH_REMATCH[2]))
      fi
      line=''
    fi
    local elapsed=$((SECONDS - started))
    if [[ -t 1 ]]; then
      if [[ $far ]] || ((elapsed)); then printf '\r\033[K%s: %s(%d s)' "$verb" "$far" "$elapsed"; fi
    elif ((quarter != shown || elapsed >= next)); then
      printf '%s: %s(%d s)\n' "$verb" "$far" "$elapsed"
      shown=$quarter next=$((elapsed + 30))
    fi
  done
  if [[ -t 1 ]] && { [[ $far ]] || ((SECONDS > started)); }; then echo; fi
}

# What cmake is told besides the preset, as -DNAME=VALUE.
configure_arguments=()

# is_configured DIR: was it, from this place, with these arguments, since the presets last changed?
is_configured() {
  local argument
  [[ $1/build.ninja -nt $root/CMakePresets.json ]] || return 1
  grep -qxF "CMAKE_HOME_DIRECTORY:INTERNAL=$root" "$1/CMakeCache.txt" || return 1
  for argument in "${configure_arguments[@]}"; do
    argument=${argument#-D}
    grep -q "^${argument%%=*}:[A-Z]*=${argument#*=}\$" "$1/CMakeCache.txt" || return 1
  done
}

# build PRESET [TARGET...]: configures when there is a need to, then builds; silent when all is up to date.
build() {
  local preset=$1 dir=$root/build/$1 log=$root/build/$1.log
  shift
  mkdir -p "$root/build"
  : >"$log"
  if ! is_configured "$dir"; then
    echo "configuring: build/$preset"
    rm -f "$dir/CMakeCache.txt" # of another place, or with what was missing then
    (cd "$root" && cmake --preset "$preset" "${configure_arguments[@]}") >"$log" 2>&1 || fail "$log" "cmake could not configure build/$preset:"
  fi
  NINJA_STATUS='[%f/%t] ' ninja -C "$dir" -j "$jobs" "$@" 2>&1 | follow_ninja "$log" ||
    fail "$log" "build/$preset does not build:"
}
