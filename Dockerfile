# docker build -t maxpipe .                        CPU
# docker build -t maxpipe --build-arg EXTRA=tpu .  TPU (also: cuda)
# docker run --rm -v "$PWD/runs:/workspace/runs" --user "$(id -u):$(id -g)" maxpipe configs/base.yml steps=20
FROM python:3.12.11-slim-bookworm AS build

WORKDIR /build
COPY pyproject.toml setup.py README.md LICENSE ./
COPY maxpipe maxpipe
COPY configs configs
RUN pip wheel --no-deps --wheel-dir dist .

FROM python:3.12.11-slim-bookworm

ARG EXTRA=cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1

WORKDIR /build
COPY constraints.txt ./
COPY --from=build /build/dist dist
RUN case "$EXTRA" in \
      cpu) pip install -c constraints.txt dist/*.whl ;; \
      tpu|cuda) pip install -c constraints.txt "$(echo dist/*.whl)[$EXTRA]" ;; \
      *) echo "EXTRA=$EXTRA is not one of cpu, tpu, cuda" >&2; exit 2 ;; \
    esac

RUN useradd --create-home --uid 1000 maxpipe \
    && install --directory --owner=maxpipe --group=maxpipe /workspace /workspace/runs
USER maxpipe
WORKDIR /workspace
COPY configs configs

ENTRYPOINT ["python", "-m", "maxpipe.train"]
CMD ["configs/base.yml"]
