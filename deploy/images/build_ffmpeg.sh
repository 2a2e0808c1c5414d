#!/bin/sh
# Builds FFmpeg for the workers' images, with the demuxers and decoders of video files only:
#   build_ffmpeg.sh PREFIX [SOURCES]
# The libraries go to PREFIX. SOURCES is the directory of the source, which is downloaded if it is
# not there. The licence of the result is LGPL 2.1 or newer: the wheel of PyAV has x264 and x265,
# whose licence is the GPL. Needs a C compiler, make, nasm, pkg-config, zlib and libdav1d (AV1).
set -eu

VERSION=8.1.2
SHA256=464beb5e7bf0c311e68b45ae2f04e9cc2af88851abb4082231742a74d97b524c
# The names are those of worker/duplane/worker/video/decoder.py; a test compares them.
DEMUXERS=mov,matroska,avi,mpegts
DECODERS=h264,hevc,vp8,vp9,libdav1d,av1,mpeg4,mpeg2video,mjpeg,ffv1,rawvideo
DECODERS=$DECODERS,aac,mp3,mp3float,opus,vorbis,flac,ac3,eac3
DECODERS=$DECODERS,pcm_s16le,pcm_s16be,pcm_s24le,pcm_s32le,pcm_f32le,pcm_u8,pcm_mulaw,pcm_alaw
# These split the streams of the decoders into frames, above all in MPEG-TS and AVI.
PARSERS=h264,hevc,vp8,vp9,av1,mpeg4video,mpegvideo,mjpeg
PARSERS=$PARSERS,aac,mpegaudio,opus,vorbis,flac,ac3
# Sound becomes float32 by a graph of these.
FILTERS=abuffer,abuffersink,aformat,aresample

prefix=$1
sources=${2:-.}
archive=$sources/ffmpeg-$VERSION.tar.xz
[ -f "$archive" ] || curl --fail --silent --show-error --location --output "$archive" \
  "https://ffmpeg.org/releases/ffmpeg-$VERSION.tar.xz"
echo "$SHA256  $archive" | sha256sum --check --quiet

build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
tar --extract --file "$archive" --directory "$build" --strip-components 1
cd "$build"
./configure --prefix="$prefix" --disable-everything --disable-autodetect --disable-network \
  --disable-programs --disable-doc --disable-debug --disable-static --enable-shared \
  --enable-pic --enable-zlib --enable-libdav1d --enable-protocol=pipe \
  --enable-demuxer="$DEMUXERS" --enable-decoder="$DECODERS" --enable-parser="$PARSERS" \
  --enable-filter="$FILTERS"
grep -q 'define FFMPEG_LICENSE "LGPL version 2.1 or later"' config.h
make --silent --jobs "$(nproc)" install
mkdir -p "$prefix/share/licenses/ffmpeg"
cp COPYING.LGPLv2.1 LICENSE.md "$prefix/share/licenses/ffmpeg"
