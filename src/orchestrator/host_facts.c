/* What a host has of what a script needs, and how two hosts differ in it. */
#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_reader.h"
#include "base/json_writer.h"
#include "orchestrator/host_agent.h"
#include "os/dialogue.h"
#include "os/entries.h"
#include "os/file.h"
#include "os/folder.h"
#include "os/host.h"
#include "os/path.h"

#include <evenstep/checkpoint.h>
#include <evenstep/version.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum {
  MOST_FILES = 4096,
  MOST_NAMES = 20000,
  MOST_DEPTH = 8,
  FILE_BYTES = 16 << 20,
  PROBE_MS = 60000,
  DIFFERENCES = 4
};

/* Without importing anything large: versions from the packages' own notes, the package's sources by a checksum, and of
 * what the script imports (and what it imports of its own folder) the versions, or the sources by a checksum. */
static const char probe[] =
    "import ast, hashlib, json, os, pathlib, sys\n"
    "import importlib.metadata as m, importlib.util as u\n"
    "r = {'python': '%d.%d.%d' % sys.version_info[:3]}\n"
    "try: r['torch'] = m.version('torch')\n"
    "except Exception: r['torch'] = 'none'\n"
    "def digest(files):\n"
    "    h = hashlib.sha256()\n"
    "    for p in sorted(files): h.update(p.name.encode() + p.read_bytes())\n"
    "    return h.hexdigest()[:16]\n"
    "try: r['package'] = digest(pathlib.Path(u.find_spec('evenstep').origin).parent.glob('*.py'))\n"
    "except Exception: r['package'] = 'none'\n"
    "own, names, seen = (os.path.dirname(sys.argv[1]) if len(sys.argv) > 1 else ''), set(), set()\n"
    "standard = getattr(sys, 'stdlib_module_names', None)\n" /* from 3.10 on; before, names are not compared */
    "def look(path):\n"
    "    if path in seen or len(seen) > 1000: return\n"
    "    seen.add(path)\n"
    "    try: tree = ast.parse(pathlib.Path(path).read_bytes())\n"
    "    except Exception: return\n"
    "    for n in ast.walk(tree):\n"
    "        if isinstance(n, ast.Import): got = [a.name for a in n.names]\n"
    "        elif isinstance(n, ast.ImportFrom) and n.level == 0 and n.module: got = [n.module]\n"
    "        else: continue\n"
    "        for top in {g.partition('.')[0] for g in got}:\n"
    "            base = os.path.join(own, top)\n"
    "            if os.path.exists(base + '.py'): look(base + '.py')\n"
    "            elif os.path.isdir(base):\n"
    "                if base in seen: continue\n"
    "                seen.add(base)\n"
    "                left = 20000\n" /* data may lie below */
    "                for folder, below, files in os.walk(base):\n"
    "                    left -= len(below) + len(files)\n"
    "                    if left < 0: break\n"
    "                    for name in files:\n"
    "                        if name.endswith('.py'): look(os.path.join(folder, name))\n"
    "            elif standard is not None and top not in standard: names.add(top)\n"
    "def version(name):\n"
    "    try: return m.version(name)\n"
    "    except Exception: pass\n"
    "    try: return m.version(m.packages_distributions()[name][0])\n"
    "    except Exception: pass\n"
    "    try: s = u.find_spec(name)\n"
    "    except Exception: s = None\n"
    "    if s is None: return 'missing'\n"
    "    try:\n"
    "        p = pathlib.Path(s.origin)\n"
    "        return digest(p.parent.glob('*.py') if p.name == '__init__.py' else [p])\n"
    "    except Exception: return 'there'\n"
    "if own: look(sys.argv[1])\n"
    "r['modules'] = {n: version(n) for n in sorted(names - {'torch', 'evenstep'})}\n"
    "try:\n"
    "    from evenstep.hosts import ucx_state, wanted_engine\n"
    "    if wanted_engine() not in ('gloo', 'mpi'): r['ucx'], r['no_ucx'] = ucx_state()\n"
    "except Exception: pass\n"
    "print(json.dumps(r))\n";

/* script: its path, "" for none. */
static even_status ask_python(const char *python, const char *script, even_text *answer) {
  char option[] = "-c";
  char words[sizeof probe];
  char *arguments[] = {(char *)python, option, words, script[0] == '\0' ? NULL : (char *)script, NULL};
  const char *line = NULL;
  even_dialogue dialogue;
  memcpy(words, probe, sizeof probe);
  EVEN_TRY(even_dialogue_start(arguments, &dialogue));
  even_status status = even_dialogue_hear(&dialogue, PROBE_MS, &line);
  if (status == EVEN_OK && line != NULL && line[0] == '{') {
    even_text_add(answer, line);
    status = even_text_status(answer);
  } else if (status == EVEN_OK) {
    char complaint[200];
    even_dialogue_complaint(&dialogue, complaint, sizeof complaint);
    status = even_fail(EVEN_ERR_INPUT, "%s says nothing of itself: %s", python, complaint);
  }
  even_dialogue_end(&dialogue);
  return status;
}

/* ---- files ---- */

static const char unreadable[] = "unreadable";
static const char missing[] = "missing"; /* of a module: the probe says so */

typedef struct file_search {
  const char *folder; /* with its '/' */
  const char *below;  /* "" or "package/" */
  even_json *json;
  int *found;
  int *names; /* that were looked at; more than MOST_NAMES: below the folder is data, and nothing of it is compared */
  int depth;
} file_search;

static void add_file(file_search *search, const char *name) {
  even_text path = EVEN_TEXT_EMPTY;
  even_text content = EVEN_TEXT_EMPTY;
  even_text key = EVEN_TEXT_EMPTY;
  char sum[24];
  even_text_format(&path, "%s%s%s", search->folder, search->below, name);
  even_text_format(&key, "%s%s", search->below, name);
  if (even_text_status(&path) == EVEN_OK && even_file_read(path.data, FILE_BYTES, &content) == EVEN_OK) {
    (void)snprintf(sum, sizeof sum, "%016llx",
                   (unsigned long long)even_checkpoint_checksum(even_text_string(&content), content.length));
    even_json_string(search->json, even_text_string(&key), sum);
  } else {
    even_json_string(search->json, even_text_string(&key), unreadable);
    even_error_clear();
  }
  even_text_free(&path);
  even_text_free(&content);
  even_text_free(&key);
}

/* Hidden ones cannot be imported: editors' locks are such. */
static bool is_source(const char *name) {
  size_t length = strlen(name);
  return length > 3 && name[0] != '.' && strcmp(name + length - 3, ".py") == 0;
}

static bool look_at(void *context, const char *name) {
  file_search *search = context;
  if (is_source(name)) {
    add_file(search, name);
    (*search->found)++;
  }
  return *search->found < MOST_FILES;
}

/* What Python can import is an identifier; names with a dot, as data sets have by the million, are not looked at. */
static bool may_be_package(const char *name) {
  bool is = (name[0] >= 'a' && name[0] <= 'z') || (name[0] >= 'A' && name[0] <= 'Z') || name[0] == '_';
  for (const char *at = name; is && *at != '\0'; at++) {
    is = (*at >= 'a' && *at <= 'z') || (*at >= 'A' && *at <= 'Z') || (*at >= '0' && *at <= '9') || *at == '_';
  }
  return is && strcmp(name, "__pycache__") != 0 && strcmp(name, "node_modules") != 0;
}

static bool is_environment(const char *folder) {
  static const char *const marks[] = {"pyvenv.cfg", "conda-meta"};
  even_text path = EVEN_TEXT_EMPTY;
  bool found = false;
  for (size_t i = 0; i < 2 && !found; i++) {
    even_text_clear(&path);
    even_text_format(&path, "%s/%s", folder, marks[i]);
    found = even_text_status(&path) == EVEN_OK && even_path_exists(path.data);
  }
  even_text_free(&path);
  return found;
}

static void look_below(file_search *search, const char *name);

static bool look_for_folders(void *context, const char *name) {
  file_search *search = context;
  if (search->below[0] != '\0' && !look_at(context, name)) {
    return false;
  }
  if (may_be_package(name) && search->depth < MOST_DEPTH) {
    look_below(search, name);
  }
  return ++*search->names <= MOST_NAMES && *search->found < MOST_FILES;
}

static void look_below(file_search *search, const char *name) {
  even_text path = EVEN_TEXT_EMPTY;
  even_text below = EVEN_TEXT_EMPTY;
  even_text_format(&path, "%s%s%s", search->folder, search->below, name);
  even_text_format(&below, "%s%s/", search->below, name);
  if (even_text_status(&path) == EVEN_OK && even_text_status(&below) == EVEN_OK && even_path_is_folder(path.data) &&
      !is_environment(path.data)) {
    file_search inner = *search;
    inner.below = below.data;
    inner.depth++;
    if (even_folder_each(path.data, look_for_folders, &inner) != EVEN_OK) {
      even_error_clear(); /* it may not be read: nothing is imported from it */
    }
  }
  even_text_free(&path);
  even_text_free(&below);
}

/* A member of its own, and none where there is too much below the folder: each host might see another part of it. */
static void add_below(even_json *json, const char *folder) {
  even_text text = EVEN_TEXT_EMPTY;
  even_json own = even_json_begin(&text, 0);
  int found = 0;
  int names = 0;
  file_search search = {.folder = folder, .below = "", .json = &own, .found = &found, .names = &names};
  even_json_object(&own, NULL);
  bool read = even_folder_each(folder, look_for_folders, &search) == EVEN_OK;
  even_json_object_end(&own);
  if (!read) {
    even_error_clear();
  } else if (names <= MOST_NAMES && found < MOST_FILES && even_text_status(&text) == EVEN_OK) {
    even_json_raw(json, "below", text.data);
  }
  even_text_free(&text);
}

/* The script's own folder is what Python imports from first. */
static void name_folder(const even_host_needs *needs, even_text *out) {
  const char *slash = needs->script == NULL ? NULL : strrchr(needs->script, '/');
  if (needs->script != NULL && needs->script[0] == '/') {
    even_text_append(out, needs->script, (size_t)(slash - needs->script));
  } else {
    even_text_format(out, "%s/%.*s", needs->folder, slash == NULL ? 0 : (int)(slash - needs->script),
                     slash == NULL ? "" : needs->script);
  }
  even_text_add(out, "/");
}

static const char *own_name(const even_host_needs *needs) {
  const char *slash = needs->script == NULL ? NULL : strrchr(needs->script, '/');
  return needs->script == NULL ? NULL : slash == NULL ? needs->script : slash + 1;
}

/* Below it lies the whole host. */
static bool is_root(const char *folder) {
  return folder[strspn(folder, "/")] == '\0';
}

static void add_files(even_json *json, const even_host_needs *needs, const even_text *folder) {
  const char *own = own_name(needs);
  int found = 0;
  int names = 0;
  file_search search = {
      .folder = even_text_string(folder), .below = "", .json = json, .found = &found, .names = &names};
  even_json_object(json, "files");
  if (even_text_status(folder) == EVEN_OK && even_folder_each(search.folder, look_at, &search) != EVEN_OK) {
    even_error_clear(); /* it is not there: no file of it is */
  } else if (own != NULL && !is_source(own)) {
    add_file(&search, own);
  }
  even_json_object_end(json);
  if (even_text_status(folder) == EVEN_OK && !is_root(folder->data)) {
    add_below(json, folder->data);
  }
}

size_t even_host_places(const even_device_list *own) {
  even_device_list all = {NULL, 0};
  bool gpus = own->count > 0 && own->items[0].kind == EVEN_DEVICE_CUDA;
  double cores = 0;
  if (own->count == 0 || gpus) {
    if (even_device_select(NULL, 0, &all) != EVEN_OK) {
      even_error_clear();
      return own->count;
    }
    own = &all;
    gpus = all.count > 0 && all.items[0].kind == EVEN_DEVICE_CUDA;
  }
  for (size_t i = 0; i < own->count; i++) {
    cores += own->items[i].cores;
  }
  size_t places = gpus ? own->count : (size_t)(cores + 0.01); /* thirds of a core add up to less */
  even_device_list_free(&all);
  return places;
}

void even_host_facts_add_devices(even_json *json, const even_device_list *devices) {
  even_json_array(json, "devices");
  for (size_t i = 0; i < devices->count; i++) {
    const even_device *device = &devices->items[i];
    even_json_object(json, NULL);
    even_json_string(json, "name", device->name);
    even_json_string(json, "model", device->model);
    even_json_integer(json, "kind", device->kind);
    even_json_number(json, "cores", device->cores);
    even_json_unsigned(json, "memory_bytes", device->memory_bytes);
    if (device->strength > 0) {
      even_json_number(json, device->strength_in_c ? "strength_in_c" : "strength", device->strength);
    }
    even_json_object_end(json);
  }
  even_json_array_end(json);
}

even_status even_host_facts_read(const even_host_needs *needs, const even_device_list *devices, even_text *out) {
  even_text answer = EVEN_TEXT_EMPTY;
  even_text folder = EVEN_TEXT_EMPTY;
  even_text script = EVEN_TEXT_EMPTY;
  even_host_names names;
  char identity[160];
  even_json json = even_json_begin(out, 0);
  EVEN_TRY(even_host_names_read(&names));
  even_json_object(&json, NULL);
  even_json_string(&json, "node", names.host);
  even_host_identity(identity, sizeof identity);
  even_json_string(&json, "identity", identity);
  even_json_string(&json, "evenstep", even_version());
  even_json_string(&json, "machine", names.architecture);
  even_json_bool(&json, "folder", even_path_is_folder(needs->folder));
  name_folder(needs, &folder);
  if (own_name(needs) != NULL) {
    even_text_format(&script, "%s%s", even_text_string(&folder), own_name(needs));
  }
  if (needs->python != NULL) {
    if (ask_python(needs->python, even_text_string(&script), &answer) == EVEN_OK) {
      even_json_raw(&json, "packages", even_text_string(&answer));
    } else {
      even_json_string(&json, "trouble", even_error_last()->what);
      even_error_clear();
    }
  }
  add_files(&json, needs, &folder);
  if (needs->data != NULL) {
    even_host_data_add(&json, needs->folder, needs->data);
  }
  if (devices != NULL) {
    even_host_facts_add_devices(&json, devices);
    even_json_unsigned(&json, "places", even_host_places(devices));
    if (needs->profile_trouble != NULL && needs->profile_trouble[0] != '\0') {
      even_json_string(&json, "profile_trouble", needs->profile_trouble);
    }
  }
  even_json_object_end(&json);
  even_text_free(&answer);
  even_text_free(&script);
  even_text_free(&folder);
  return even_text_status(out);
}

/* ---- comparing ---- */

/* Where what a host says of itself can be read at all. */
static bool is_of_form(const json_t *facts) {
  return json_is_object(facts) && json_is_object(json_object_get(facts, "files")) &&
         json_is_boolean(json_object_get(facts, "folder"));
}

typedef struct differences {
  even_text words;
  int count;
} differences;

static void EVEN_PRINTF(2, 3) add(differences *all, const char *format, ...) {
  char words[200];
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(words, sizeof words, format, arguments);
  va_end(arguments);
  if (all->count++ < DIFFERENCES) {
    even_text_format(&all->words, "%s%s", all->count > 1 ? "; " : "", words);
  }
}

static void compare_packages(const json_t *ours, const json_t *theirs, differences *all) {
  static const char *const names[] = {"python", "torch", "package"};
  static const char *const words[] = {"Python", "torch", "the evenstep package (by its sources)"};
  for (size_t i = 0; i < 3; i++) {
    const char *mine = even_json_text(ours, names[i]);
    const char *other = even_json_text(theirs, names[i]);
    if (strcmp(mine, other) != 0) {
      add(all, "%s is %s there and %s here", words[i], other, mine);
    }
  }
}

/* Of what the script imports; what neither host has may be wanted by none. */
static void compare_modules(const json_t *ours, const json_t *theirs, differences *all) {
  const char *name = NULL;
  json_t *version = NULL;
  json_object_foreach((json_t *)ours, name, version) {
    const char *mine = even_json_text(ours, name);
    const char *other = even_json_text(theirs, name);
    if (other[0] == '\0' || strcmp(mine, other) == 0 || strcmp(mine, missing) == 0) {
      continue;
    }
    if (strcmp(other, missing) == 0) {
      add(all, "module %s, which the script imports, is missing there (%s here)", name, mine);
    } else {
      add(all, "module %s is %s there and %s here", name, other, mine);
    }
  }
}

static bool is_unreadable(const json_t *sum) {
  return json_is_string(sum) && strcmp(json_string_value(sum), unreadable) == 0;
}

static void compare_files(const json_t *ours, const json_t *theirs, differences *all) {
  const char *name = NULL;
  json_t *sum = NULL;
  json_object_foreach((json_t *)ours, name, sum) {
    const json_t *other = json_object_get(theirs, name);
    if (other == NULL) {
      add(all, "%s is not there", name);
    } else if (is_unreadable(sum) || is_unreadable(other)) {
      add(all, "%s cannot be read %s", name, is_unreadable(other) ? "there" : "here");
    } else if (!json_equal(sum, (json_t *)other)) {
      add(all, "%s is another one there (%s, here %s)", name, json_is_string(other) ? json_string_value(other) : "?",
          json_is_string(sum) ? json_string_value(sum) : "?");
    }
  }
  json_object_foreach((json_t *)theirs, name, sum) {
    if (json_object_get(ours, name) == NULL) {
      add(all, "%s is there alone", name);
    }
  }
}

even_status even_host_facts_compare(const json_t *ours, const json_t *theirs, const char *name, const char *folder) {
  differences all = {EVEN_TEXT_EMPTY, 0};
  if (!is_of_form(theirs)) {
    return even_fail(EVEN_ERR_INPUT, "host %s: what it says of itself cannot be read", name);
  }
  if (!json_is_true(json_object_get(theirs, "folder"))) {
    (void)even_fail(EVEN_ERR_MISMATCH, "host %s has no folder %s, in which the ranks run", name, folder);
    return even_error_fix("copy it there: rsync -a %s/ %s:%s/, or share it (NFS)", folder, name, folder);
  }
  const char *trouble = even_json_text(theirs, "trouble");
  if (trouble[0] != '\0') {
    (void)even_fail(EVEN_ERR_MISMATCH, "host %s: %s", name, trouble);
    return even_error_fix("install the same Python there, or name one that all hosts have with --python");
  }
  if (strcmp(even_json_text(ours, "machine"), even_json_text(theirs, "machine")) != 0) {
    add(&all, "it is %s, this host %s", even_json_text(theirs, "machine"), even_json_text(ours, "machine"));
  }
  compare_packages(json_object_get(ours, "packages"), json_object_get(theirs, "packages"), &all);
  compare_modules(json_object_get(json_object_get(ours, "packages"), "modules"),
                  json_object_get(json_object_get(theirs, "packages"), "modules"), &all);
  int packages = all.count;
  compare_files(json_object_get(ours, "files"), json_object_get(theirs, "files"), &all);
  if (json_is_object(json_object_get(ours, "below")) && json_is_object(json_object_get(theirs, "below"))) {
    compare_files(json_object_get(ours, "below"), json_object_get(theirs, "below"), &all);
  }
  even_status status = even_text_status(&all.words);
  if (status == EVEN_OK && all.count > 0) {
    char more[48] = "";
    if (all.count > DIFFERENCES) {
      (void)snprintf(more, sizeof more, "; and %d more", all.count - DIFFERENCES);
    }
    status = even_fail(EVEN_ERR_MISMATCH, "host %s differs from this one: %.480s%s", name, even_text_string(&all.words),
                       more);
    if (packages > 0) {
      (void)even_error_fix("install the same versions on all hosts");
    } else {
      (void)even_error_fix(
          "let the script's folder be the same there: rsync -a --delete --include='*.py' …, or share it (NFS)");
    }
  }
  even_text_free(&all.words);
  return status;
}

static void read_strength(const json_t *item, even_device *device) {
  double in_c = json_number_value(json_object_get(item, "strength_in_c"));
  double strength = in_c > 0 ? in_c : json_number_value(json_object_get(item, "strength"));
  device->strength = strength > 0 && isfinite(strength) ? strength : 0;
  device->strength_in_c = in_c > 0;
}

even_status even_host_facts_devices(const json_t *facts, even_device_list *out) {
  const json_t *list = json_object_get(facts, "devices");
  *out = (even_device_list){NULL, 0};
  size_t count = json_array_size(list);
  if (count < 1 || count > EVEN_TELEMETRY_MOST_RANKS) {
    return even_fail(EVEN_ERR_INPUT, "%zu devices", count);
  }
  EVEN_TRY(EVEN_NEW_ARRAY(&out->items, count));
  out->count = count;
  for (size_t i = 0; i < count; i++) {
    const json_t *item = json_array_get(list, i);
    even_device *device = &out->items[i];
    (void)snprintf(device->name, sizeof device->name, "%s", even_json_text(item, "name"));
    (void)snprintf(device->model, sizeof device->model, "%s", even_json_text(item, "model"));
    device->kind =
        json_integer_value(json_object_get(item, "kind")) == EVEN_DEVICE_CUDA ? EVEN_DEVICE_CUDA : EVEN_DEVICE_CPU;
    device->cores = json_number_value(json_object_get(item, "cores"));
    device->memory_bytes = (uint64_t)json_integer_value(json_object_get(item, "memory_bytes"));
    device->numa_node = device->cuda_index = device->efficiency = -1;
    read_strength(item, device);
  }
  return EVEN_OK;
}
