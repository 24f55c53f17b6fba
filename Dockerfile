# syntax=docker/dockerfile:1
# Two images from one file, for Docker alone and for the chart:
#
#   docker build --target cpu  --tag paceline:0.1.0-cpu  .
#   docker build --target cuda --tag paceline:0.1.0-cuda .
#
# A release build names both bases with their digests: --build-arg CUDA_IMAGE=nvidia/cuda:...@sha256:...
ARG PYTHON_IMAGE=python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b
ARG CUDA_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu24.04

# The package as a wheel: no image holds a checkout, whose folders could hide installed packages of their names.
FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${PYTHON_IMAGE} AS cpu-base
# bash and wget: KubeRay starts Ray with the one and asks for its health with the other.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bash tini wget \
    && rm -rf /var/lib/apt/lists/*

FROM cpu-base AS cpu-install
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt /tmp/
# torch alone from its own index: PyPI's wheel brings CUDA.
RUN python -m venv /opt/paceline \
    && torch="$(grep '^torch==' /tmp/constraints.txt)" \
    && /opt/paceline/bin/pip install --no-cache-dir --no-deps --index-url "${TORCH_CPU_INDEX}" "${torch}"
COPY --from=wheel /wheels /wheels
RUN /opt/paceline/bin/pip install --no-cache-dir --constraint /tmp/constraints.txt /wheels/*.whl
COPY deploy/image/finish.sh /tmp/
RUN /tmp/finish.sh

# nvcc and a compiler stay in this image: FlashInfer builds kernels for the GPU that it finds.
FROM ${CUDA_IMAGE} AS cuda-base
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        bash build-essential ninja-build python3 python3-dev python3-venv tini wget \
    && rm -rf /var/lib/apt/lists/* \
    && ln -s /usr/bin/python3 /usr/local/bin/python

FROM cuda-base AS cuda-install
COPY constraints.txt /tmp/
COPY --from=wheel /wheels /wheels
RUN python -m venv /opt/paceline \
    && wheel="$(echo /wheels/*.whl)" \
    && /opt/paceline/bin/pip install --no-cache-dir --constraint /tmp/constraints.txt "${wheel}[gpu]"
COPY deploy/image/finish.sh /tmp/
RUN /tmp/finish.sh

FROM cuda-base AS cuda
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility CUDA_HOME=/usr/local/cuda
ENV PATH=/opt/paceline/bin:/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 RAY_USAGE_STATS_ENABLED=0 \
    PACELINE_CACHE=/opt/paceline/cache HF_HOME=/cache/huggingface HOME=/cache \
    RAY_SERVE_HAPROXY_BINARY_PATH=/opt/paceline/bin/haproxy
COPY --from=cuda-install --chown=1000:1000 /opt/paceline /opt/paceline
RUN install --directory --owner=1000 --group=1000 /cache
USER 1000:1000
WORKDIR /cache
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=5s --start-period=30m --retries=3 \
    CMD ["wget", "-q", "-O", "/dev/null", "http://127.0.0.1:8000/health"]
ENTRYPOINT ["tini", "--", "paceline"]
CMD ["serve", "--host", "0.0.0.0"]

FROM cpu-base AS cpu
ENV PATH=/opt/paceline/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 RAY_USAGE_STATS_ENABLED=0 \
    PACELINE_CACHE=/opt/paceline/cache HF_HOME=/cache/huggingface HOME=/cache \
    RAY_SERVE_HAPROXY_BINARY_PATH=/opt/paceline/bin/haproxy
COPY --from=cpu-install --chown=1000:1000 /opt/paceline /opt/paceline
RUN install --directory --owner=1000 --group=1000 /cache
USER 1000:1000
WORKDIR /cache
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=5s --start-period=30m --retries=3 \
    CMD ["wget", "-q", "-O", "/dev/null", "http://127.0.0.1:8000/health"]
ENTRYPOINT ["tini", "--", "paceline"]
CMD ["serve", "--host", "0.0.0.0"]
