/* A file system that says it is NFS, so that other hosts see it. */
#ifndef EVEN_TESTS_SUPPORT_NFS_H
#define EVEN_TESTS_SUPPORT_NFS_H

#include <sys/vfs.h>

/* For even_os.fstatfs. */
int statfs_of_nfs(int fd, struct statfs *out);

#endif
