# The image of a trainer or a sampler, for a CPU. For GPUs: --build-arg TORCH_INDEX_URL= (empty: pip's own index, which
# has the CUDA build of torch), --build-arg EXTRAS=vllm and --build-arg CONSTRAINTS=constraints-gpu.txt.
FROM python:3.11.15-slim-bookworm AS build
ARG EXTRAS=train
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
ARG CONSTRAINTS=constraints.txt
ENV DS_BUILD_OPS=0
WORKDIR /src
COPY constraints.txt constraints-gpu.txt ./
COPY ops/pip.txt ops/
RUN python -m venv /opt/tinsmith && /opt/tinsmith/bin/pip install --no-cache-dir -r ops/pip.txt
# torch is installed first and alone: it is by far the largest layer, and no change to our code rebuilds it. PyTorch's
# index has nothing else in our versions, so the packages that torch depends on are installed later. One retry and a
# short timeout: if the index cannot be reached, pip's own configuration decides within seconds.
RUN if [ -z "${TORCH_INDEX_URL}" ] || ! /opt/tinsmith/bin/pip install --no-cache-dir -c "${CONSTRAINTS}" \
        --no-deps --retries 1 --timeout 15 --index-url "${TORCH_INDEX_URL}" torch; then \
        /opt/tinsmith/bin/pip install --no-cache-dir -c "${CONSTRAINTS}" --no-deps torch; \
    fi
COPY pyproject.toml hashes.txt README.md LICENSE ./
COPY ops/requirements.py ops/
COPY app app
COPY workers workers
RUN python ops/requirements.py "${EXTRAS}" > requirements.txt \
    && /opt/tinsmith/bin/pip install --no-cache-dir -c hashes.txt -c "${CONSTRAINTS}" -r requirements.txt \
    && /opt/tinsmith/bin/pip install --no-cache-dir --no-deps --no-build-isolation .

FROM python:3.11.15-slim-bookworm
# DeepSpeed and vLLM compile small extensions on first use; the volume on /var/lib/tinsmith keeps them.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++=4:12.2.0-3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 10001 --home-dir /var/lib/tinsmith --create-home tinsmith
COPY --from=build /opt/tinsmith /opt/tinsmith
# In the containers /tmp is in memory: too small for a checkpoint, and not executable.
ENV PATH=/opt/tinsmith/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    TMPDIR=/var/lib/tinsmith \
    VLLM_NO_USAGE_STATS=1
USER 10001
WORKDIR /var/lib/tinsmith
