/* Names, disks, interfaces and limits of this host. */
#include "os/host.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "os/calls.h"
#include "os/file.h"

#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/sysmacros.h>
#include <sys/utsname.h>
#if defined(__GLIBC__)
#include <gnu/libc-version.h>
#endif

even_status even_host_names_read(even_host_names *out) {
  struct utsname names;
  *out = (even_host_names){0};
  if (even_os.uname(&names) != 0) {
    return even_fail_errno(errno, "the name of this host cannot be read");
  }
  (void)snprintf(out->host, sizeof out->host, "%s", names.nodename);
  (void)snprintf(out->kernel, sizeof out->kernel, "%s", names.release);
  (void)snprintf(out->architecture, sizeof out->architecture, "%.31s", names.machine);
#if defined(__GLIBC__)
  (void)snprintf(out->libc, sizeof out->libc, "glibc %s", gnu_get_libc_version());
#else
  (void)snprintf(out->libc, sizeof out->libc, "not glibc");
#endif
  return EVEN_OK;
}

void even_host_identity(char *out, size_t bytes) {
  even_text host = EVEN_TEXT_EMPTY;
  const even_error kept = *even_error_last();
  char space[64];
  const char *said = getenv("EVENSTEP_HOST_ID");
  bool known = said != NULL && said[0] != '\0';
  out[0] = '\0';
  if (known) {
    even_text_add(&host, said);
  } else {
    known = even_file_read("/proc/sys/kernel/random/boot_id", 128, &host) == EVEN_OK;
  }
  ssize_t length = even_os.readlink("/proc/self/ns/pid", space, sizeof space - 1);
  if (known && length > 0) {
    space[length] = '\0';
    (void)snprintf(out, bytes, "%.*s %s", (int)strcspn(even_text_string(&host), "\n"), even_text_string(&host), space);
  }
  even_text_free(&host);
  (void)even_error_restore(&kept);
}

/* FNV-1a (Fowler, Noll, Vo). */
uint32_t even_host_mark(const char *identity, size_t bytes) {
  uint32_t hash = 2166136261U;
  for (size_t i = 0; i < bytes && identity[i] != '\0'; i++) {
    hash = (hash ^ (unsigned char)identity[i]) * 16777619U;
  }
  return hash;
}

/* Finds the device number in /proc/self/mountinfo (proc(5)): "… 254:0 ROOT POINT … - TYPE …". */
static void mount_find(dev_t device, char *mounts, even_disk *out) {
  char wanted[32];
  char *save = NULL;
  (void)snprintf(wanted, sizeof wanted, "%u:%u", major(device), minor(device));
  for (char *line = strtok_r(mounts, "\n", &save); line != NULL; line = strtok_r(NULL, "\n", &save)) {
    char number[32];
    char point[256];
    const char *tail = strstr(line, " - ");
    if (tail == NULL || sscanf(line, "%*s %*s %31s %*s %255s", number, point) != 2 || strcmp(number, wanted) != 0) {
      continue;
    }
    (void)sscanf(tail, " - %31s", out->filesystem);
    (void)snprintf(out->mount, sizeof out->mount, "%s", point);
    return;
  }
}

static even_status device_of(const char *path, dev_t *out) {
  struct stat info;
  int fd = even_os.open(path, O_RDONLY | O_CLOEXEC, 0);
  if (fd < 0) {
    return even_fail_errno(errno, "%s cannot be opened", path);
  }
  even_status status = EVEN_OK;
  if (even_os.fstat(fd, &info) != 0) {
    status = even_fail_errno(errno, "%s cannot be examined", path);
  } else {
    *out = info.st_dev;
  }
  (void)even_os.close(fd);
  return status;
}

even_status even_disk_read(const char *path, even_disk *out) {
  struct statvfs space;
  dev_t device = 0;
  even_text mounts = EVEN_TEXT_EMPTY;
  *out = (even_disk){.filesystem = "unknown"};
  if (even_os.statvfs(path, &space) != 0) {
    return even_fail_errno(errno, "the disk that holds %s cannot be examined", path);
  }
  out->total_bytes = (uint64_t)space.f_blocks * space.f_frsize;
  out->free_bytes = (uint64_t)space.f_bavail * space.f_frsize;
  EVEN_TRY(device_of(path, &device));
  even_status status = even_file_read("/proc/self/mountinfo", 4 << 20, &mounts);
  if (status == EVEN_OK) {
    mount_find(device, mounts.data, out);
  }
  even_text_free(&mounts);
  return status == EVEN_ERR_MEMORY ? status : EVEN_OK;
}

static even_interface *interface_of(even_interface_list *list, const char *name, even_status *status) {
  for (size_t i = 0; i < list->count; i++) {
    if (strcmp(list->items[i].name, name) == 0) {
      return &list->items[i];
    }
  }
  *status = even_realloc((void **)&list->items, list->count + 1, sizeof *list->items);
  if (*status != EVEN_OK) {
    return NULL;
  }
  even_interface *added = &list->items[list->count++];
  *added = (even_interface){.megabits_per_second = -1};
  (void)snprintf(added->name, sizeof added->name, "%s", name);
  return added;
}

static even_status speed_read(even_interface *interface) {
  const even_error kept = *even_error_last();
  char path[96];
  even_text content = EVEN_TEXT_EMPTY;
  (void)snprintf(path, sizeof path, "/sys/class/net/%s/speed", interface->name);
  even_status status = even_file_read(path, 64, &content);
  if (status == EVEN_OK) {
    long long speed = strtoll(even_text_string(&content), NULL, 10);
    interface->megabits_per_second = speed > 0 && speed < 10000000 ? speed : -1; /* a driver may say 2^32-1 */
  }
  even_text_free(&content);
  if (status == EVEN_ERR_MEMORY) {
    return status;
  }
  (void)even_error_restore(&kept); /* most drivers of virtual interfaces say nothing: what failed before counts */
  return EVEN_OK;
}

static void address_add(even_interface *interface, const struct ifaddrs *entry) {
  char address[80]; /* an IPv6 address with its scope */
  size_t used = strlen(interface->addresses);
  int family = entry->ifa_addr == NULL ? AF_UNSPEC : entry->ifa_addr->sa_family;
  socklen_t bytes = family == AF_INET    ? (socklen_t)sizeof(struct sockaddr_in)
                    : family == AF_INET6 ? (socklen_t)sizeof(struct sockaddr_in6)
                                         : 0;
  if (bytes == 0 || getnameinfo(entry->ifa_addr, bytes, address, sizeof address, NULL, 0, NI_NUMERICHOST) != 0) {
    return;
  }
  if (used + strlen(address) + 3 < sizeof interface->addresses) { /* one more than fits is left out whole */
    (void)snprintf(interface->addresses + used, sizeof interface->addresses - used, "%s%s", used > 0 ? ", " : "",
                   address);
  }
}

even_status even_interface_list_read(even_interface_list *out) {
  struct ifaddrs *entries = NULL;
  even_status status = EVEN_OK;
  *out = (even_interface_list){0};
  if (even_os.getifaddrs(&entries) != 0) {
    return even_fail_errno(errno, "the network interfaces cannot be listed");
  }
  for (const struct ifaddrs *entry = entries; entry != NULL && status == EVEN_OK; entry = entry->ifa_next) {
    even_interface *interface = interface_of(out, entry->ifa_name, &status);
    if (interface == NULL) {
      break;
    }
    interface->up = (entry->ifa_flags & IFF_UP) != 0 && (entry->ifa_flags & IFF_RUNNING) != 0;
    interface->loopback = (entry->ifa_flags & IFF_LOOPBACK) != 0;
    address_add(interface, entry);
  }
  freeifaddrs(entries);
  for (size_t i = 0; i < out->count && status == EVEN_OK; i++) {
    status = speed_read(&out->items[i]);
  }
  return status;
}

void even_interface_list_free(even_interface_list *list) {
  even_free(list->items);
  *list = (even_interface_list){0};
}

even_status even_host_memlock_bytes(uint64_t *out) {
  struct rlimit limit;
  if (even_os.getrlimit(RLIMIT_MEMLOCK, &limit) != 0) {
    return even_fail_errno(errno, "the limit on locked memory cannot be read");
  }
  *out = limit.rlim_cur == RLIM_INFINITY ? UINT64_MAX : limit.rlim_cur;
  return EVEN_OK;
}
