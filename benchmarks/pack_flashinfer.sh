#!/usr/bin/env bash
# Packs FlashInfer for `benchmarks/serving.py` on a machine with a GPU and without a network.
#
#     benchmarks/pack_flashinfer.sh FOLDER          # here: some 20 MB in FOLDER
#     . FOLDER/install                              # there: PYTHONPATH and FlashInfer's settings
#
# It is for Python 3.12 and CUDA 13, and has FlashInfer's paged FA2 attention alone. Modules are
# compiled there by nvcc and ninja, which takes minutes each, unless FLASHINFER_PREBUILT names a
# folder of compiled ones (NAME/NAME.so, as FlashInfer's cached_ops holds them).
set -eu
[ $# = 1 ] || { echo "usage: pack_flashinfer.sh FOLDER (a new one)" >&2; exit 2; }
[ ! -e "$1" ] || { echo "pack_flashinfer.sh: $1 exists: name a new folder" >&2; exit 1; }
mkdir -p "$1"; kit=$(cd "$1" && pwd)
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
platforms=(); for v in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux1; do platforms+=(--platform "${v}_x86_64"); done
for package in flashinfer-python==0.7.2.post1 apache-tvm-ffi==0.1.15.post2 nvidia-ml-py einops tabulate tqdm requests urllib3 idna certifi charset-normalizer click filelock packaging; do
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" -d "$work/wheels" "$package"
done
mkdir "$work/site"; for w in "$work"/wheels/*.whl; do python3 -m zipfile -e "$w" "$work/site"; done
cd "$work/site/flashinfer"
# What the FA2 modules include: FlashInfer's own headers, and libcudacxx; of the sources those of plain attention.
rm -rf data/cutlass data/spdlog data/cccl/thrust data/cccl/cub data/build_*.py
find data/csrc -mindepth 1 -maxdepth 1 -type d -exec rm -rf {} +
find data/csrc -type f ! -name 'batch_*' ! -name 'single_*' ! -name 'page*' ! -name 'tvm_ffi_utils.h' ! -name '*.jinja' ! -name '*.inc' -delete
# Kernels of other architectures and of other layers: `import flashinfer` needs their Python alone.
find . -path ./data -prune -o -type f \( -name '*.cu' -o -name '*.cuh' -o -name '*.cubin' -o -name '*.md' -o -name '*.h' \) -print0 | xargs -0 rm -f
mkdir -p data/cutlass/include data/cutlass/tools/util/include data/spdlog/include data/cccl/cub data/cccl/thrust
if [ -n "${FLASHINFER_PREBUILT:-}" ]; then
  for so in "$FLASHINFER_PREBUILT"/*/*.so; do name=$(basename "$so" .so); mkdir -p "data/aot/$name"; cp "$so" "data/aot/$name/"; strip --strip-unneeded "data/aot/$name/$name.so" || true; done
fi
cd - >/dev/null
find "$work/site" -name '__pycache__' -prune -exec rm -rf {} +
tar c -C "$work/site" . | xz -T0 -6 >"$kit/all.xz"
cat >"$kit/install" <<'I'
# source it on the machine with the GPU: PYTHONPATH grows
kit=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
flashinfer=$(python3 -c 'import tempfile; print(tempfile.gettempdir())')/flashinfer-kit
[ -d "$flashinfer/site" ] || { mkdir -p "$flashinfer/site.new" && xz -d -T0 <"$kit/all.xz" | tar x -C "$flashinfer/site.new" && mv "$flashinfer/site.new" "$flashinfer/site"; }
# Behind all others: the machine's own packages come first, and torch is not in the kit.
export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$flashinfer/site" FLASHINFER_WORKSPACE_BASE="$flashinfer" FLASHINFER_CUDA_ARCH_LIST="${FLASHINFER_CUDA_ARCH_LIST:-9.0a}" FLASHINFER_DISABLE_VERSION_CHECK=1 MAX_JOBS="${MAX_JOBS:-16}"
python3 -c 'import flashinfer; print("flashinfer", flashinfer.__version__, flashinfer.__file__)'
I
ls -la "$kit"; ls "$work/site/flashinfer/data/aot" 2>/dev/null || true
