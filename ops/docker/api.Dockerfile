# The image of the API, from the base package alone. Flower uses the same file with --build-arg EXTRAS=flower.
FROM python:3.11.15-slim-bookworm AS build
ARG EXTRAS=""
WORKDIR /src
COPY pyproject.toml constraints.txt hashes.txt README.md LICENSE ./
COPY ops/pip.txt ops/requirements.py ops/
COPY app app
COPY workers workers
RUN python -m venv /opt/tinsmith \
    && /opt/tinsmith/bin/pip install --no-cache-dir -r ops/pip.txt \
    && python ops/requirements.py "${EXTRAS}" > requirements.txt \
    && /opt/tinsmith/bin/pip install --no-cache-dir -c hashes.txt -c constraints.txt -r requirements.txt \
    && /opt/tinsmith/bin/pip install --no-cache-dir --no-deps --no-build-isolation .

FROM python:3.11.15-slim-bookworm
RUN useradd --system --uid 10001 --home-dir /var/lib/tinsmith --create-home tinsmith
COPY --from=build /opt/tinsmith /opt/tinsmith
ENV PATH=/opt/tinsmith/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    TMPDIR=/var/lib/tinsmith
USER 10001
WORKDIR /var/lib/tinsmith
EXPOSE 8000
CMD ["python", "-m", "gunicorn", "-c", "python:app.gunicorn_conf", "app.wsgi:application"]
