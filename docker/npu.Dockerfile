# The package and its operators on NPUs, on CANN's own images. Not run by us: no NPU and no CANN image was at hand.
#
#   docker build -f docker/npu.Dockerfile --build-arg SERIES=a3 -t ascend_moe:a3 .     A3, Ascend910_93 (the default)
#   docker build -f docker/npu.Dockerfile --build-arg SERIES=a2 -t ascend_moe:a2 .     A2, Ascend910B
#
# The 310P is not supported: build.sh knows no such SoC. Run it with the devices and the driver of the host:
#
#   docker run --device /dev/davinci0 --device /dev/davinci_manager --device /dev/devmm_svm --device /dev/hisi_hdc \
#       -v /usr/local/Ascend/driver:/usr/local/Ascend/driver:ro -v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi:ro \
#       ascend_moe:a3 ascend-moe doctor
ARG SERIES=a3

FROM quay.io/ascend/cann:8.5.1-910b-ubuntu22.04-py3.11 AS a2
ENV SOC=ascend910b

FROM quay.io/ascend/cann:8.5.1-a3-ubuntu22.04-py3.11 AS a3
ENV SOC=ascend910_93

# One of the two stages above.
# hadolint ignore=DL3006
FROM ${SERIES}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ make \
    && rm -rf /var/lib/apt/lists/*
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" torch==2.10.0 \
    && pip install --no-cache-dir torch_npu==2.10.0.post4 scikit-build-core==1.1.2 cmake==4.4.5 ninja==1.13.2
WORKDIR /workspace
COPY . .
# CANN's environment is that of a shell which has sourced it: here, and in the entry point.
ENV CANN=/usr/local/Ascend/cann/set_env.sh
# hadolint ignore=DL3013,SC1090
RUN . "$CANN" && ./build.sh --soc="$SOC" --build-dir=/tmp/opp \
    && bash /tmp/opp/custom_opp_*.run --quiet \
    && pip install --no-cache-dir --no-build-isolation '.[cli]' \
    && rm -rf /tmp/opp build
ENTRYPOINT ["/bin/bash", "-c", ". \"$CANN\" && . \"$ASCEND_OPP_PATH/vendors/ascend_moe/bin/set_env.bash\" && exec \"$@\"", "--"]
CMD ["ascend-moe", "doctor"]
