# The package on CPUs: docker build -f docker/cpu.Dockerfile -t ascend_moe . && docker run ascend_moe
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

# The tools of a build; .devcontainer takes this stage alone. Every target brings the Python packages along.
FROM python:3.11-slim-bookworm AS tools
# Debian keeps one version of each in a release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ccache g++ git make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /workspace

FROM tools AS wheel
ARG TORCH_INDEX
COPY . .
RUN make wheel TORCH_INDEX="$TORCH_INDEX"

# No compiler: the wheel has every engine and the virtual NPU.
FROM python:3.11-slim-bookworm
ARG TORCH_INDEX
WORKDIR /workspace
COPY --from=wheel /workspace/dist/ dist/
COPY examples/ examples/
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" torch==2.13.0 \
    && for wheel in dist/*.whl; do pip install --no-cache-dir "${wheel}[cli]"; done
CMD ["ascend-moe", "run"]
