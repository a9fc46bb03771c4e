# Launcher, router and shards in one image, used like TGI's:
#   docker build -f deploy/docker/launcher.Dockerfile -t millrace .
#   docker run --shm-size 1g -p 8080:80 -v "$PWD/data:/data" millrace --model-id <hub name or folder>
# Add --gpus all for NVIDIA GPUs. The default build of torch runs on both kinds of machine; a TORCH_INDEX with
# PyTorch's CPU builds makes a smaller image. With --target sagemaker the image reads SageMaker's variables and
# listens on 8080 (docs/from-tgi.md).
ARG PYTHON_IMAGE=python:3.12.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
# The compiler makes the CPU kernels that the wheel has, for all kinds of x86 processors with AVX2.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --no-install-recommends --yes g++
WORKDIR /src
COPY constraints.txt LICENSE README.md pyproject.toml ./
COPY demo/model demo/model
COPY cluster cluster
COPY proto proto
COPY launcher launcher
COPY router router
COPY shard shard
COPY package package
# The kernels are compiled for the torch that is there.
ARG TORCH_INDEX=""
RUN python -m venv /opt/millrace \
    && /opt/millrace/bin/pip install --no-cache-dir -c constraints.txt \
    ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} torch \
    && /opt/millrace/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . \
    && /opt/millrace/bin/pip install --no-cache-dir -c constraints.txt \
    ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} "$(echo /wheels/*.whl)[otel,kv-events]"

FROM ${PYTHON_IMAGE} AS runtime
LABEL org.opencontainers.image.title="Millrace" \
      org.opencontainers.image.description="Text-generation server: launcher, router and shards in one container" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="0.1.0"
# On a GPU Triton compiles its launchers with the compiler. The volume keeps what is compiled for the next container.
# In a named volume uid 10001 can write to /data. The default user is root, because folders that users mount there
# belong to root.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home millrace \
    && install --directory --owner=10001 /data
COPY --from=build /opt/millrace /opt/millrace
COPY --chmod=644 deploy/docker/http_health.py /opt/millrace/http_health.py
ENV PATH=/opt/millrace/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/data \
    MILLRACE_CACHE=/data/millrace \
    PORT=80
WORKDIR /home/millrace
HEALTHCHECK --interval=10s --timeout=6s --start-period=1800s --retries=3 \
    CMD ["python", "/opt/millrace/http_health.py"]

FROM runtime AS sagemaker
COPY --chmod=644 deploy/docker/sagemaker.py /opt/millrace/sagemaker.py
ENV PORT=8080
EXPOSE 8080
ENTRYPOINT ["python", "/opt/millrace/sagemaker.py"]

# Without --target, docker builds the last stage.
FROM runtime AS launcher
EXPOSE 80
ENTRYPOINT ["millrace-launcher"]
