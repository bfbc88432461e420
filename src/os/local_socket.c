/* socket, bind, connect of AF_UNIX. */
#include "os/local_socket.h"

#include "base/fail.h"
#include "os/calls.h"
#include "os/socket.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>

enum { BACKLOG = 16 };

/* An address has 108 bytes, a path may have 4,096: the folder is opened, and named by its descriptor. */
static even_status name_socket(const char *folder, const char *name, struct sockaddr_un *where, int *opened) {
  memset(where, 0, sizeof *where);
  where->sun_family = AF_UNIX;
  *opened = even_os.open(folder, O_PATH | O_DIRECTORY | O_CLOEXEC, 0);
  if (*opened < 0) {
    return even_fail_errno(errno, "%s cannot be opened", folder);
  }
  int length = snprintf(where->sun_path, sizeof where->sun_path, "/proc/self/fd/%d/%s", *opened, name);
  if (length < 0 || (size_t)length >= sizeof where->sun_path) {
    (void)even_os.close(*opened);
    return even_fail(EVEN_ERR_ARGUMENT, "%s is a long name for a socket", name);
  }
  return EVEN_OK;
}

/* The mode of a socket that is not bound yet is that of the file that it makes. */
static even_status listen_at(int fd, const struct sockaddr_un *where, const char *folder, const char *name) {
  if (even_os.unlink(where->sun_path) != 0 && errno != ENOENT) {
    return even_fail_errno(errno, "%s/%s cannot be removed", folder, name);
  }
  if (even_os.fchmod(fd, 0600) != 0 || even_os.bind(fd, (const struct sockaddr *)where, sizeof *where) != 0 ||
      even_os.listen(fd, BACKLOG) != 0) {
    return even_fail_errno(errno, "%s/%s cannot be listened at", folder, name);
  }
  return EVEN_OK;
}

even_status even_local_socket_listen(const char *folder, const char *name, int *fd) {
  struct sockaddr_un where;
  int opened = -1;
  *fd = -1;
  EVEN_TRY(name_socket(folder, name, &where, &opened));
  int made = even_os.socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  even_status status =
      made < 0 ? even_fail_errno(errno, "a socket could not be made") : listen_at(made, &where, folder, name);
  (void)even_os.close(opened);
  if (status != EVEN_OK) {
    if (made >= 0) {
      (void)even_os.close(made);
    }
    return status;
  }
  *fd = made;
  return EVEN_OK;
}

static int is_ours(int fd) {
  struct ucred who;
  socklen_t bytes = sizeof who;
  return even_os.getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &bytes) == 0 &&
         (who.uid == 0 || who.uid == even_os.geteuid());
}

even_status even_local_socket_accept(int listener, int *fd) {
  EVEN_TRY(even_socket_take(listener, fd));
  if (*fd >= 0 && !is_ours(*fd)) {
    (void)even_os.close(*fd);
    *fd = -1;
  }
  return EVEN_OK;
}

even_status even_local_socket_connect(const char *folder, const char *name, int *fd) {
  struct sockaddr_un where;
  int opened = -1;
  *fd = -1;
  EVEN_TRY(name_socket(folder, name, &where, &opened));
  int made = even_os.socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  even_status status = EVEN_OK;
  if (made < 0) {
    status = even_fail_errno(errno, "a socket could not be made");
  } else if (even_os.connect(made, (const struct sockaddr *)&where, sizeof where) != 0) {
    int reason = errno;
    status = reason == ECONNREFUSED || reason == ENOENT
                 ? even_fail(EVEN_ERR_NOT_FOUND, "nobody listens at %s/%s", folder, name)
                 : even_fail_errno(reason, "%s/%s cannot be connected to", folder, name);
    (void)even_os.close(made);
  }
  (void)even_os.close(opened);
  if (status == EVEN_OK) {
    *fd = made;
  }
  return status;
}
