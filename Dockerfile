# SPDX-License-Identifier: Apache-2.0
# The image: upstream's, with the files that the patches change. `python build.py` prepares the folder that this is built
# in, calls the builder and gives all arguments; see docs/image.md. No `# syntax=` line: it would fetch a frontend.
ARG BASE_IMAGE

FROM ${BASE_IMAGE} AS patched
USER 0
# What this layer is made of; a cache then cannot take another one's for it.
ARG INPUTS
ARG SOURCE_DATE_EPOCH
ARG KIND=layer
ARG RELEASE
ARG FLAVOR
ARG ARCH
ARG ORIGIN
# hadolint ignore=DL3003
RUN --mount=type=bind,target=/src \
    cd /src && PYTHONHASHSEED=0 python3 -B -m "builder.${KIND}" \
    --release "${RELEASE}" --flavor "${FLAVOR}" --arch "${ARCH}" --origin "${ORIGIN}"

FROM scratch AS digest
COPY --from=patched /usr/share/vllm-ndt/manifest.digest /

FROM patched
ARG SOURCE_DATE_EPOCH
ARG VERSION
ARG PATCHES
ARG MANIFEST
ARG SOURCE
ARG BASE_NAME
ARG BASE_DIGEST
COPY --chmod=755 py-spy /usr/local/bin/py-spy
LABEL org.opencontainers.image.title="vLLM with vllm-ndt's patches" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${BASE_NAME}" \
      org.opencontainers.image.base.digest="${BASE_DIGEST}" \
      vllm-ndt.patches="${PATCHES}" \
      vllm-ndt.manifest="${MANIFEST}" \
      vllm-ndt.source="${SOURCE}"
# Nothing is sent: said to vLLM in each way that it knows, here and by a file in its configuration's folder.
ENV VLLM_NO_USAGE_STATS=1 \
    DO_NOT_TRACK=1 \
    VLLM_NDT_USAGE_STATS=0 \
    VLLM_CONFIG_ROOT=/etc/vllm \
    HF_HUB_DISABLE_TELEMETRY=1
HEALTHCHECK --interval=10s --timeout=10s --retries=3 --start-period=30m CMD ["vllm-ndt", "health"]
ENTRYPOINT ["vllm-ndt", "serve"]
CMD []
