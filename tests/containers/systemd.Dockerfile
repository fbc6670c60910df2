# systemd as the first process, with pillarbox also in /opt/shop/bin. Units and modules are
# mounted. It needs CAP_SYS_ADMIN.
FROM pillarbox
USER 0
RUN apt-get update && apt-get install --yes --no-install-recommends systemd \
    && mkdir /opt/shop && ln -s ../pillarbox/bin /opt/shop/bin
HEALTHCHECK NONE
# Units get their credentials through a shared mount. Where the engine uses cgroups of the
# first version, which systemd 256 no longer does, those of the second are used, in which
# limits have no effect.
CMD mount --make-rshared / && umount -R /sys/fs/cgroup \
    && mount -t cgroup2 cgroup2 /sys/fs/cgroup && exec /lib/systemd/systemd
