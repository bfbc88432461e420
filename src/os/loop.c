/* epoll, level-triggered. */
#include "os/loop.h"

#include "base/fail.h"
#include "os/calls.h"

#include <errno.h>
#include <string.h>

enum { EVENTS_A_TURN = 64 };

even_status even_loop_open(even_loop *out) {
  out->fd = even_os.epoll_create1(EPOLL_CLOEXEC);
  return out->fd >= 0 ? EVEN_OK : even_fail_errno(errno, "an event loop could not be opened");
}

void even_loop_close(even_loop *loop) {
  if (loop->fd >= 0) {
    (void)even_os.close(loop->fd);
    loop->fd = -1;
  }
}

even_status even_loop_add(even_loop *loop, even_loop_watch *watch, int fd, void (*ready)(void *context, int fd),
                          void *context) {
  struct epoll_event event;
  memset(&event, 0, sizeof event);
  event.events = EPOLLIN;
  event.data.ptr = watch;
  *watch = (even_loop_watch){.fd = -1, .ready = ready, .context = context};
  if (even_os.epoll_ctl(loop->fd, EPOLL_CTL_ADD, fd, &event) != 0) {
    return even_fail_errno(errno, "descriptor %d could not be watched", fd);
  }
  watch->fd = fd;
  return EVEN_OK;
}

even_status even_loop_writable(even_loop *loop, even_loop_watch *watch, bool wanted) {
  struct epoll_event event;
  memset(&event, 0, sizeof event);
  event.events = wanted ? EPOLLIN | EPOLLOUT : EPOLLIN;
  event.data.ptr = watch;
  if (watch->fd >= 0 && even_os.epoll_ctl(loop->fd, EPOLL_CTL_MOD, watch->fd, &event) != 0) {
    return even_fail_errno(errno, "descriptor %d could not be watched", watch->fd);
  }
  return EVEN_OK;
}

void even_loop_remove(even_loop *loop, even_loop_watch *watch) {
  if (watch->fd >= 0) {
    (void)even_os.epoll_ctl(loop->fd, EPOLL_CTL_DEL, watch->fd, NULL);
    watch->fd = -1;
  }
}

even_status even_loop_turn(even_loop *loop, int timeout_ms) {
  struct epoll_event events[EVENTS_A_TURN];
  int count = even_os.epoll_wait(loop->fd, events, EVENTS_A_TURN, timeout_ms);
  if (count < 0 && errno == EINTR) {
    return EVEN_OK;
  }
  if (count < 0) {
    return even_fail_errno(errno, "events could not be waited for");
  }
  for (int i = 0; i < count; i++) {
    even_loop_watch *watch = events[i].data.ptr;
    if (watch->fd >= 0) { /* else an earlier call of this turn removed it */
      watch->ready(watch->context, watch->fd);
    }
  }
  return EVEN_OK;
}
