// Files are replaced whole or not at all, links are written through, locks keep others out.
#include "braid/core/file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <thread>

#include "tests/support/errors.h"
#include "tests/support/folders.h"
#include "tests/support/limits.h"

namespace braid::test {
namespace {

namespace fs = std::filesystem;
using testing::ElementsAre;
using testing::HasSubstr;

std::string error_at(const std::string& path) {
  return error_of<c10::Error>([&] { replace_file(path, "after"); });
}

TEST(File, IsReplacedWholeAndNothingElseIsLeft) {
  const TemporaryFolder folder;
  replace_file(folder / "x", "before");
  replace_file(folder / "x", "after");
  EXPECT_EQ(read_text(folder / "x"), "after");
  NewFile(folder / "x").write("lost", 4, 0);
  EXPECT_EQ(read_text(folder / "x"), "after");
  EXPECT_THAT(names_in(folder.path()), ElementsAre("x"));
}

TEST(File, AFullDiskLeavesTheFileThatWasThere) {
  const TemporaryFolder folder;
  write_text(folder / "x", "before");
  std::string error;
  {
    const FileSizeLimit limit(1000);
    error = error_of<c10::Error>([&] { replace_file(folder / "x", std::string(2000, 'x')); });
  }
  EXPECT_EQ(error, "can't write " + (folder / "x") + ": File too large");
  EXPECT_EQ(read_text(folder / "x"), "before");
  EXPECT_THAT(names_in(folder.path()), ElementsAre("x"));
}

TEST(File, ALinkIsWrittenThrough) {
  const TemporaryFolder folder;
  write_text(folder / "x", "before");
  fs::create_directory(folder / "links");
  fs::create_symlink("../x", folder / "links/relative");
  fs::create_symlink(folder / "links/relative", folder / "links/chain");
  fs::create_symlink("../new", folder / "links/dangling");
  fs::create_symlink("loop", folder / "links/loop");
  for (const char* name : {"relative", "chain", "dangling"}) {
    replace_file(folder / ("links/" + std::string(name)), name);
    EXPECT_TRUE(fs::is_symlink(folder / ("links/" + std::string(name))));
    EXPECT_EQ(read_text(folder / ("links/" + std::string(name))), name);
  }
  EXPECT_EQ(read_text(folder / "x"), "chain");
  EXPECT_EQ(read_text(folder / "new"), "dangling");
  EXPECT_THAT(error_at(folder / "links/loop"), HasSubstr("Too many levels of symbolic links"));
  EXPECT_THAT(names_in(folder / "links"), ElementsAre("chain", "dangling", "loop", "relative"));
}

TEST(File, WhatIsNoRegularFileIsLeftAlone) {
  const TemporaryFolder folder;
  fs::create_directory(folder / "folder");
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  fs::create_symlink(folder / "pipe", folder / "link");
  EXPECT_EQ(error_at(folder / "folder"), "can't write " + (folder / "folder") + ": it is a folder");
  for (const char* name : {"pipe", "link"})
    EXPECT_EQ(error_at(folder / name),
              "can't write " + (folder / name) + ": it is not a regular file");
  EXPECT_TRUE(fs::is_fifo(folder / "pipe"));
  EXPECT_EQ(error_at(folder / "none/x"),
            "can't write " + (folder / "none/x") + ": No such file or directory");
}

TEST(File, LinksAreReplacedAndNotFollowed) {
  const TemporaryFolder folder;
  write_text(folder / "x", "before");
  replace_link(folder / "link", "x");
  replace_link(folder / "link", "y");
  replace_link(folder / "link", "y");
  EXPECT_EQ(fs::read_symlink(folder / "link"), "y");
  EXPECT_EQ(read_text(folder / "x"), "before");
  EXPECT_THAT(error_of<c10::Error>([&] { replace_link(folder / "none/link", "x"); }),
              HasSubstr("can't make the link " + (folder / "none/link")));
}

TEST(File, WhatKilledReplacementsLeftIsRemoved) {
  const TemporaryFolder folder;
  for (const char* name : {"x", ".x.1.0.partial", ".x.22.3.partial", ".xy.1.0.partial", ".x.lock"})
    write_text(folder / name, "");
  remove_partials(folder / "x");
  remove_partials(folder / "none/x");
  EXPECT_THAT(names_in(folder.path()), ElementsAre(".x.lock", ".xy.1.0.partial", "x"));
}

TEST(FileLock, KeepsOthersOutAndGoesInTheEnd) {
  const TemporaryFolder folder;
  fs::create_symlink("x", folder / "link");
  std::atomic<int> inside{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&, i] {
      for (int round = 0; round < 20; ++round) {
        const FileLock lock(folder / (i % 2 == 0 ? "x" : "link"));
        EXPECT_EQ(++inside, 1);
        std::this_thread::sleep_for(std::chrono::microseconds(200));
        --inside;
      }
    });
  for (auto& thread : threads) thread.join();
  EXPECT_THAT(names_in(folder.path()), ElementsAre("link"));
  EXPECT_THAT(error_of<c10::Error>([&] { FileLock(folder / "none/x"); }), HasSubstr("none/x"));
}

}  // namespace
}  // namespace braid::test
